"""Calls of a trace in words."""

from scheduler.trace.records import (
    Apply,
    BlameStep,
    Call,
    Cancel,
    LoseWorkers,
    ResetPrefixCache,
    Resize,
    Schedule,
    ScheduleEmpty,
    Submit,
)


def describe(call: Call) -> str:
    """One line, without its time."""
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
            return f"resize to {call.num_blocks} blocks and {call.num_swap_blocks} host blocks"
        case ResetPrefixCache():
            return "reset the prefix cache"
