"""Where two plans, or two states, differ first."""

from collections.abc import Sequence

import msgspec

from scheduler.trace.columns import decode_rows_of
from scheduler.trace.records import PlanRecord

# Field, what was expected, what came.
Differing = tuple[str, str, str]

_LONGEST_SHOWN = 300


def differing_plans(expected: PlanRecord | None, got: PlanRecord | None) -> Differing | None:
    """None: they are equal."""
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
    """The innermost value that differs, by its name, such as "new_rows[2].block_ids[0]". None: all is equal."""
    return None if expected == got else _differing(name, expected, got)


def _differing(name: str, expected: object, got: object) -> Differing:
    """They do differ."""
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
