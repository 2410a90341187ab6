"""Describes recorded calls in words, and finds the first difference between two plans or two states."""

from collections.abc import Sequence

import msgspec

from scheduler.recording.records import (
    Apply,
    BlameStep,
    Call,
    Cancel,
    ItemFailed,
    ItemPrepared,
    LoseWorkers,
    PlanRecord,
    ResetPrefixCache,
    Resize,
    Schedule,
    ScheduleEmpty,
    SetCosts,
    Submit,
    decode_rows_of,
)


def describe(call: Call) -> str:
    """Describes a call in one line, without its time."""
    match call:
        case Submit():
            request = call.request
            return (
                f"submit group {request.group} ({request.request_id}): {len(request.prompt_token_ids)} prompt tokens, "
                f"choices {[start.choice for start in request.choices]}, max_tokens {request.stop.max_tokens}"
            )
        case Cancel():
            choices = "" if call.choices is None else f", choices {call.choices}"
            return f"cancel group {call.group}{choices}" + (f": {call.cause}" if call.cause else "")
        case Schedule():
            if call.plan is None:
                return "schedule: no plan"
            plan = call.plan
            return (
                f"schedule step {plan.step}: {len(plan.new_rows)} new rows, {len(plan.chunks)} chunks, "
                f"{len(plan.freed_rows)} freed rows"
            )
        case ScheduleEmpty():
            return "schedule an empty step: no plan" if call.plan is None else f"schedule empty step {call.plan.step}"
        case Apply():
            result = call.result
            failed = f", {len(result.failed)} failed" if result.failed else ""
            return f"apply the result of step {result.step}: {len(result.token_ids) // 4} tokens{failed}"
        case LoseWorkers():
            return "lose workers"
        case BlameStep():
            return "blame the steps that were in flight"
        case Resize():
            items = "" if call.encoder_cache_size is None else f", {call.encoder_cache_size} embeddings of items"
            return f"resize to {call.num_blocks} blocks and {call.num_swap_blocks} host blocks{items}"
        case ItemPrepared():
            return f"item {call.number} is prepared"
        case ItemFailed():
            return f"item {call.number} can't be prepared: {call.message}"
        case SetCosts():
            return f"take the costs of steps of {list(call.costs.num_tokens)} tokens"
        case ResetPrefixCache():
            return "reset the prefix cache"


# (field, expected value, actual value)
Differing = tuple[str, str, str]

_LONGEST_SHOWN = 300


def differing_plans(expected: PlanRecord | None, got: PlanRecord | None) -> Differing | None:
    """The first difference between two plans; None if they are equal."""
    if expected == got:
        return None
    if expected is None or got is None:
        return "plan", _plan_in_short(expected), _plan_in_short(got)
    if expected.decode_rows != got.decode_rows:
        found = _differing("decode_rows", decode_rows_of(expected), decode_rows_of(got))
    else:
        found = differing_values("", expected, got)
    assert found is not None
    return found


def differing_values(name: str, expected: object, got: object) -> Differing | None:
    """The innermost value that differs, by name, such as "new_rows[2].block_ids[0]"; None if all are equal."""
    return None if expected == got else _differing(name, expected, got)


def _differing(name: str, expected: object, got: object) -> Differing:
    """The innermost difference between two values that differ."""
    if isinstance(expected, msgspec.Struct) and type(expected) is type(got):
        for field in expected.__struct_fields__:
            a, b = getattr(expected, field), getattr(got, field)
            if a != b:
                return _differing(f"{name}.{field}" if name else field, a, b)
    if isinstance(expected, list) and isinstance(got, list):
        return _differing_lists(name, expected, got)
    return name, _show(expected), _show(got)


def _differing_lists(name: str, expected: list[object], got: list[object]) -> Differing:
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            name, a, b = _differing(f"{name}[{index}]", a, b)
            return name, a, b
    shorter = min(len(expected), len(got))
    return f"{name}[{shorter}]", _rest(expected, shorter), _rest(got, shorter)


def _rest(values: Sequence[object], start: int) -> str:
    return _show(values[start]) if start < len(values) else f"nothing: it has {len(values)} entries"


def _plan_in_short(plan: PlanRecord | None) -> str:
    if plan is None:
        return "no plan"
    return (
        f"step {plan.step}: {len(decode_rows_of(plan))} decodes, {len(plan.new_rows)} new rows, "
        f"{len(plan.chunks)} chunks"
    )


def _show(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
