"""Invariants of every plan, and of a step without one: budget, rows, order, and no idling without need.

Rows are given away in order, with one exception: if max_long_partial_prefills is below max_num_partial_prefills, a
prefill of at most long_prefill_token_threshold tokens may overtake a longer one while as many long ones as allowed are
unfinished.

Within a step a decode of a later sequence goes before a prefill of an earlier one (without chunked prefill: the other
way round), and before nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.core.messages import Plan
from scheduler.core.state.blocks import num_blocks_for
from tests.properties import inside
from tests.properties.items import check_encoded, may_lack_items
from tests.properties.model import ModelSequence, plans_between, work_of
from tests.properties.pace import check_pace

if TYPE_CHECKING:
    from tests.properties.world import World


def rest_of_batch(world: World) -> int:
    """Upper bound on the plans until every live sequence has ended, if no new one comes."""
    return plans_between(world.settings) * sum(work_of(sequence, world.settings) for sequence in world.live.values())


def check_plan(world: World, plan: Plan) -> int:
    """Checks a plan that the worker has not seen yet. Returns how many sequences later ones overtook."""
    settings = world.settings
    assert len(world.in_flight) < settings.max_steps_in_flight, "too many plans in flight"
    assert plan.step == (world.in_flight[-1].plan.step + 1 if world.in_flight else world.worker.step + 1)
    assert 1 <= plan.num_tokens <= settings.max_num_batched_tokens, "over the token budget, or empty"
    assert sorted(plan.freed_rows) == sorted(world.rows_to_free), "not the rows that have become free"
    named = {row for flight in world.in_flight for row in flight.rows}
    assert not named & {planned.row for planned in plan.new_rows}, "a row is given away while a step that names it runs"
    batch = set(dict(plan.batch))
    rows = {sequence.row for sequence in world.by_generation.values()} | {planned.row for planned in plan.new_rows}
    assert batch <= rows, "a row without a sequence is scheduled"
    assert len(rows) <= settings.max_num_seqs
    if settings.num_stages > 1:
        assert not named & batch, "a sequence is in two steps of a pipeline"
    _check_constrained(world, plan, named)
    _check_drafts(world, plan)
    _check_kinds(world, plan)
    _check_decodes(world, plan, batch)
    check_encoded(world, plan)
    check_pace(world, plan)
    return _check_admissions(world, plan)


def _check_constrained(world: World, plan: Plan, named: set[int]) -> None:
    """A held sequence, or one that waits for its forced tokens, is in one step at a time."""
    going_on = {*plan.decode_rows.tolist(), *plan.rows_with_drafts.tolist()}
    for sequence in world.by_generation.values():
        if sequence.row in going_on:
            is_held = sequence.request.is_constrained and world.settings.holds_constrained
            assert sequence.row not in named or not is_held, "a held sequence is in two steps"
            assert sequence.row not in named or not sequence.waits, "a sequence goes on that waits for forced tokens"
            world.seen["held, then planned"] += is_held
            world.seen["waited for forced tokens"] += sequence.waits
            sequence.waits = False


def check_empty_plan(world: World, plan: Plan | None) -> None:
    """Checks an empty step's plan, before the worker has seen it. It computes nothing but carries all other changes."""
    has_room = len(world.in_flight) < world.settings.max_steps_in_flight
    assert has_room == (plan is not None), "too many plans in flight, or no empty one although there is room for it"
    if plan is None:
        return
    assert plan.step == (world.in_flight[-1].plan.step + 1 if world.in_flight else world.worker.step + 1)
    assert not plan.num_tokens, "a step that should compute nothing"
    assert not plan.new_rows, "a row is given away in a step that computes nothing"
    assert not plan.grown_rows, "blocks are given away in a step that computes nothing"
    assert sorted(plan.freed_rows) == sorted(world.rows_to_free), "not the rows that have become free"


def check_found_blocks(world: World, plan: Plan) -> None:
    """New sequences reuse no block of a sequence known to have failed. Call it after the worker has written."""
    for planned in plan.new_rows:
        found = planned.block_ids[: planned.num_computed_tokens // world.settings.block_size]
        assert not world.spoiled & set(found), "a block of a failed sequence is found"


def _check_drafts(world: World, plan: Plan) -> None:
    settings = world.settings
    known_later = {row for flight in world.in_flight for row, _ in flight.plan.drafts}
    batch = set(dict(plan.batch))
    assert not known_later & batch, "a sequence goes on before its drafts are verified"
    by_row = {sequence.row: sequence for sequence in world.by_generation.values()}
    for row, drafts in plan.drafts:
        request, speculation = by_row[row].request, settings.speculation
        most = settings.max_forced_tokens if request.is_constrained else 0
        if speculation is not None:
            allowed = [speculation.num_speculative_tokens, request.max_drafts]
            most = max(most, min(each for each in allowed if each is not None))
        assert 1 <= len(drafts) <= most, "more drafts than allowed"
        # All of them may be accepted, and another token follows.
        assert world.worker.rows[row].num_outputs + len(drafts) < by_row[row].request.stop.max_tokens, (
            "drafts past the end"
        )


def _check_kinds(world: World, plan: Plan) -> None:
    """Without chunked prefill, prefills are whole and not mixed with decodes; with it, few are left unfinished."""
    settings = world.settings
    new = {planned.row: planned for planned in plan.new_rows}
    prefills = []
    num_partial = num_long = 0
    is_over_budget = False
    for row, count in plan.chunks:
        if row in new:
            lacking = len(new[row].token_ids) - new[row].num_computed_tokens
        else:
            lacking = world.worker.rows[row].num_lacking
        if world.worker.rows.get(row) is not None and world.worker.rows[row].has_failed and row not in new:
            continue
        prefills.append(row)
        threshold = settings.long_prefill_token_threshold
        assert not threshold or count <= threshold, "a chunk beyond the threshold"
        if count < lacking:
            num_partial += 1
            is_over_budget = lacking > settings.max_num_batched_tokens
            num_long += bool(threshold) and lacking > threshold
    if settings.enable_chunked_prefill:
        assert num_partial <= settings.max_num_partial_prefills, "too many prefills are left unfinished"
        assert num_long <= settings.max_long_partial_prefills, "too many long prefills are left unfinished"
    else:
        # A context that is computed again may be longer than any prompt that was accepted.
        assert not num_partial or is_over_budget, "a prefill is not whole"
        is_mixed = prefills and len(prefills) < len(plan.batch)
        assert not is_mixed, "prefills are mixed with decodes"


def _can_go_on(world: World, sequence: ModelSequence) -> bool:
    """True if a running sequence can compute a token without waiting for a result; False if only the core can tell."""
    assert sequence.row is not None
    row = world.worker.rows[sequence.row]
    if row.has_failed or row.num_outputs >= sequence.request.stop.max_tokens:
        return False
    if row.items and not row.has_sampled:
        # It may wait for items, or for room for them.
        return False
    is_named = any(sequence.row in flight.rows for flight in world.in_flight)
    if not is_named:
        return True
    if sequence.waits or any(sequence.row == row for flight in world.in_flight for row, _ in flight.plan.drafts):
        return False
    if sequence.request.is_constrained and world.settings.holds_constrained and row.has_sampled:
        return False
    # If drafts should pay, the next token waits for the result.
    return world.settings.num_stages == 1 and not (row.has_sampled and world.settings.speculation)


def _may_sit_out(world: World, sequence: ModelSequence) -> bool:
    """True if the sequence lacks a block and may take none by preemption: it, or a later one, has just come back."""
    assert sequence.row is not None
    row = world.worker.rows[sequence.row]
    lacks_block = len(row.block_ids) * world.settings.block_size < len(row.token_ids)
    return lacks_block and any(
        other.is_protected and other.order >= sequence.order for other in world.by_generation.values()
    )


def _check_decodes(world: World, plan: Plan, batch: set[int]) -> None:
    """Every step decodes all decoding sequences; if the budget is too small, the first in order."""
    settings = world.settings
    if world.is_isolating:
        return
    if not settings.enable_chunked_prefill and plan.chunks:
        return
    rows = world.worker.rows
    decodes = {
        row: sequence
        for sequence in world.by_generation.values()
        if (row := sequence.row) is not None
        and rows[row].has_sampled
        and rows[row].num_lacking == 1
        and _can_go_on(world, sequence)
    }
    left_out = [
        sequence.order for row, sequence in decodes.items() if row not in batch and not _may_sit_out(world, sequence)
    ]
    if left_out:
        # Stages share out the decodes, except those with drafts.
        taken = decodes.keys() & batch - set(plan.rows_with_drafts.tolist() if settings.num_stages > 1 else ())
        late = [decodes[row].key for row in taken if decodes[row].order > min(left_out)]
        assert not late, f"decodes of {late} go before an earlier one"
        world.seen["decodes beyond the budget"] += 1


def _check_admissions(world: World, plan: Plan) -> int:
    """No sequence gets a row while an earlier one waits."""
    settings = world.settings
    new = []
    for planned in plan.new_rows:
        key = world.core.key_of(planned.sequence)
        assert key in world.live, "a row for a sequence that is not live"
        new.append((world.live[key], planned))
    if world.is_isolating:
        # The isolation may have ended in this very step.
        is_alone = len({sequence.request.group for sequence, _ in new}) <= 1
        assert is_alone or not inside.is_isolating(world.core), "a suspect is not alone"
        return 0
    taken = {sequence.key for sequence, _ in new}
    waiting = [sequence for sequence in world.waiting if sequence.key not in taken]
    passed = set()
    for sequence, planned in new:
        for earlier in waiting:
            if earlier.order > sequence.order:
                continue
            has_priority = settings.scheduling_policy == "priority" and earlier.order[0] < sequence.order[0]
            if earlier.tenant != sequence.tenant and not has_priority:
                # Tenants share, but not with requests of lower priority.
                continue
            if may_lack_items(world, earlier, plan):
                # The later ones are now ahead of it.
                earlier.last_plan += plans_between(settings) * work_of(sequence, settings)
                world.seen["items: overtaken while they are prepared"] += 1
                continue
            may_pass = settings.max_long_partial_prefills < settings.max_num_partial_prefills
            threshold = settings.long_prefill_token_threshold
            assert may_pass, f"{sequence.key} overtakes {earlier.key}"
            assert earlier.num_tokens > threshold, "a short prefill is overtaken"
            assert len(planned.token_ids) - planned.num_computed_tokens <= threshold, "a long prefill overtakes another"
            passed.add(earlier.key)
    return len(passed)


def check_no_plan(world: World, *, has_preempted: bool) -> None:
    """Checks that nothing could have been planned: too many plans are in flight, or all depends on their results.

    has_preempted: a sequence has just lost its blocks, which no other takes in the same step.
    """
    settings = world.settings
    if len(world.in_flight) == settings.max_steps_in_flight:
        return
    if not world.in_flight:
        assert not world.live or world.unanswered, "an empty step while something waits"
        return
    if world.is_isolating:
        return
    running = list(world.by_generation.values())
    ready = [sequence.key for sequence in running if _can_go_on(world, sequence) and not _may_sit_out(world, sequence)]
    assert not ready, f"an empty step while {ready} could go on"
    # Choices wait for the prompt that another choice computes, and few prefills may share a step.
    if any(sequence.request.items for sequence in world.live.values()):
        return
    if has_preempted or not world.waiting or any(not world.worker.rows[each.row].has_sampled for each in running):  # type: ignore[index]
        return
    firsts = {
        sequence.tenant: sequence for sequence in sorted(world.waiting, key=lambda each: each.order, reverse=True)
    }
    free_rows = settings.max_num_seqs - len(world.resting_rows) - len(running)
    # Its whole context, and one block that each running sequence may need next.
    needed = [num_blocks_for(each.num_tokens, settings.block_size) + len(running) for each in firsts.values()]
    fits = max(needed) <= world.core.load.num_free_blocks
    assert not (fits and free_rows), f"an empty step while the first of {[*firsts]} could be admitted"
