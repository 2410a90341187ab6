"""Counts what happens in a walk: a walk in which little happens proves little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.messages import Plan, Result

if TYPE_CHECKING:
    from tests.properties.world import World


def count_plan(world: World, plan: Plan, result: Result) -> None:
    """Counts what a plan shows that the worker has just executed."""
    seen = world.seen
    seen["decode steps"] += not plan.chunks
    seen["mixed steps"] += bool(plan.chunks) and plan.num_decodes > 0
    seen["several plans in flight"] += len(world.in_flight) > 1
    seen["three plans in flight"] += len(world.in_flight) > 2
    seen["look-ahead blocks given back"] += len(plan.trimmed_rows)
    seen["drafts planned"] += len(plan.draft_token_ids)
    seen["drafts wanted"] += len(plan.wanted_drafts)
    speculation = world.settings.speculation
    if speculation is not None and not speculation.workers_draft:
        constrained = {each.row for each in world.by_generation.values() if each.request.is_constrained}
        seen["drafts of the core's drafters"] += sum(row not in constrained for row, _ in plan.drafts)
    if result.num_tokens is not None:
        seen["drafts accepted"] += int(result.num_tokens.sum()) - len(result.num_tokens)
    partial = sum(world.worker.rows[row].num_lacking > 0 for row, _ in plan.chunks if row in world.worker.rows)
    seen["a prefill was chunked"] += partial > 0
    seen["several prefills were chunked"] += partial > 1
    tables = [
        set(planned.block_ids[: planned.num_computed_tokens // world.settings.block_size]) for planned in plan.new_rows
    ]
    seen["prefix hit within a batch"] += any(a & b for i, a in enumerate(tables) for b in tables[:i])
