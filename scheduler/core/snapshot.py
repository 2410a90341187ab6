"""Converts the whole state of a core to plain typed values, and back.

It leaves out what follows from the rest (the waiting queue, deadlines, end tokens, hashes of unpublished blocks), what
no plan depends on (cache events, ends and wanted items that were not taken yet), and `GroupRequest.sampling`, which is
opaque. What drafters know of running sequences follows from the tokens: it is made anew, in the saved core and in the
restored one.
"""

import dataclasses
from array import array
from collections import Counter

import numpy as np

from scheduler.core.messages import ChoiceStart
from scheduler.core.saved import (
    SavedDrafting,
    SavedFaultIsolation,
    SavedGroup,
    SavedItems,
    SavedPool,
    SavedRows,
    SavedSequence,
    SavedStep,
    Snapshot,
)
from scheduler.core.state.fault_isolation import Suspicion
from scheduler.core.state.request import Group, Sequence, SequenceStatus
from scheduler.core.state.running import StepInFlight
from scheduler.core.state.state import State

# Far above any useful value.
_MOST_TOKENS_A_BLOCK, _MOST_STEPS = 1 << 16, 1 << 10


# --- From a core


def save(state: State, num_arrivals: int) -> Snapshot:
    """Saves a core's state. Time and size are proportional to the tokens of all live requests plus the KV blocks."""
    free, cached, hashes = state.pool.save()
    free_rows, resting, untold = state.rows.save()
    return Snapshot(
        settings=state.settings,
        stats=dataclasses.replace(state.stats),
        step=state.step,
        num_arrivals=num_arrivals,
        num_generations=state.running.num_generations,
        groups=[_save_group(group, state) for group in state.groups.values()],
        in_flight=[_save_step(awaited, state.running.by_generation) for awaited in state.in_flight],
        pool=SavedPool(free=free, cached=cached, hashes=hashes),
        rows=SavedRows(free=free_rows, resting=resting, untold=untold),
        free_host_blocks=state.host_blocks.save(),
        swapped_out=list(state.swapped_out),
        # The others no longer have a row.
        trimmed=[
            (generation, kept) for sequence, generation, kept in state.trimmed if sequence.generation == generation
        ],
        fault_isolation=_save_fault_isolation(state),
        shares=state.waiting.shares.save(),
        drafting=_save_drafting(state),
        items=_save_items(state),
        pace=None if state.pace is None else state.pace.save(),
    )


def _save_items(state: State) -> SavedItems | None:
    if not state.items.num_numbers:
        return None
    items, unheld, forgotten = state.items.save()
    return SavedItems(items=items, num_numbers=state.items.num_numbers, unheld=unheld, forgotten=forgotten)


def _save_drafting(state: State) -> SavedDrafting | None:
    if state.drafting is None:
        return None
    costs, hits, tries, recent_outputs, output_lengths, worth = state.drafting.save()
    return SavedDrafting(
        costs=costs, hits=hits, tries=tries, recent_outputs=recent_outputs, output_lengths=output_lengths, worth=worth
    )


def _save_fault_isolation(state: State) -> SavedFaultIsolation:
    isolation = state.fault_isolation
    return SavedFaultIsolation(
        by_group={group: (each.num_failures, dict(each.cleared_at)) for group, each in isolation.by_group.items()},
        lost={group: dict(choices) for group, choices in isolation.lost.items()},
        is_isolating=isolation.is_isolating,
        alone=isolation.alone,
    )


def _save_group(group: Group, state: State) -> SavedGroup:
    timeline, num_dropped = state.timelines.save(group.number)
    return SavedGroup(
        request=dataclasses.replace(group.request, sampling=None),
        is_queued=state.admission.is_queued(group.number),
        sequences=[_save_sequence(sequence, state) for sequence in group.sequences.values()],
        timeline=timeline,
        num_timeline_entries_dropped=num_dropped,
    )


def _save_sequence(sequence: Sequence, state: State) -> SavedSequence:
    if sequence.is_decoding:
        state.decodes.settle(sequence)
    return SavedSequence(
        choice=sequence.choice,
        order=sequence.order,
        status=sequence.status,
        output_token_ids=list(sequence.output_token_ids),
        num_cached_tokens=sequence.num_cached_tokens,
        num_tokens_when_preempted=sequence.num_tokens_when_preempted,
        row=sequence.row,
        generation=sequence.generation,
        last_step=sequence.last_step,
        block_ids=list(sequence.block_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_published_blocks=sequence.num_published_blocks,
        is_decoding=sequence.is_decoding,
        drafts=sequence.drafts,
        host_blocks=list(sequence.host_blocks),
        num_swapped_tokens=sequence.num_swapped_tokens,
        waits=sequence.is_decoding and state.decodes.waits(sequence),
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        next_item=sequence.next_item,
        holds_item=sequence.holds_item,
    )


def _save_step(awaited: StepInFlight, by_generation: dict[int, Sequence]) -> SavedStep:
    generations = awaited.generations.tolist()
    forced: dict[int, tuple[int, ...]] = {}
    num_drafts = [] if awaited.num_drafts is None else awaited.num_drafts.tolist()
    if awaited.has_forced:
        # Nothing is expected of those that have left their rows since.
        found = {each: by_generation[each] for each in generations if each in by_generation}
        forced = {each: sequence.drafts for each, sequence in found.items() if sequence.drafts}
        num_drafts = [
            0 if each in forced or each not in found else count
            for each, count in zip(generations, num_drafts, strict=True)
        ]
    return SavedStep(
        step=awaited.step,
        generations=generations,
        rows=awaited.rows.tolist(),
        positions=awaited.positions.tolist(),
        drafts=forced,
        finishing=[generation for sequence, generation in awaited.finishing if sequence.generation == generation],
        is_empty=awaited.is_empty,
        num_prefill_tokens=awaited.num_prefill_tokens,
        num_drafts=num_drafts if any(num_drafts) else [],
        num_expected_drafts=awaited.num_expected_drafts,
        timing=awaited.timing,
    )


# --- Into a core


def check_sizes(snapshot: Snapshot) -> None:
    """Checks, before a core is made, that its settings allocate no more than what the snapshot contains.

    Raises ValueError.
    """
    settings, pool, rows = snapshot.settings, snapshot.pool, snapshot.rows
    sequences = [sequence for group in snapshot.groups for sequence in group.sequences]
    held = {block for sequence in sequences for block in sequence.block_ids}
    for name, size, expected in (
        ("num_blocks", settings.num_blocks, len(pool.free) + len(pool.cached) + len(held)),
        (
            "max_num_seqs",
            settings.max_num_seqs,
            len(rows.free) + len(rows.resting) + sum(s.row >= 0 for s in sequences),
        ),
        (
            "num_swap_blocks",
            settings.num_swap_blocks,
            len(snapshot.free_host_blocks) + sum(len(sequence.host_blocks) for sequence in sequences),
        ),
    ):
        if size != expected:
            raise ValueError(f"{name} is {size}, but {expected} are free or held")
    if not (0 < settings.block_size <= _MOST_TOKENS_A_BLOCK and 0 < settings.max_steps_in_flight <= _MOST_STEPS):
        raise ValueError(f"block_size={settings.block_size}, max_steps_in_flight={settings.max_steps_in_flight}")


def restore(snapshot: Snapshot, state: State) -> None:
    """Fills `state`, which must be new and have the snapshot's settings."""
    for group in snapshot.groups:
        _restore_group(group, state)
    if (saved_items := snapshot.items) is not None:
        state.items.num_numbers = saved_items.num_numbers
        state.items.restore(saved_items.items, saved_items.unheld, saved_items.forgotten, state.groups.values())
    by_generation = state.running.by_generation
    holders = Counter(block for sequence in by_generation.values() for block in sequence.block_ids)
    pool, rows = snapshot.pool, snapshot.rows
    state.pool.restore(pool.free, pool.cached, pool.hashes, holders)
    state.rows.restore(rows.free, rows.resting, rows.untold)
    state.host_blocks.restore(snapshot.free_host_blocks)
    state.running.num_generations = snapshot.num_generations
    for step in snapshot.in_flight:
        state.in_flight.add(_restore_step(step, by_generation))
    state.stats = state.items.stats = dataclasses.replace(snapshot.stats)
    state.step = snapshot.step
    state.swapped_out = list(snapshot.swapped_out)
    state.trimmed = [(by_generation[generation], generation, kept) for generation, kept in snapshot.trimmed]
    _restore_fault_isolation(snapshot.fault_isolation, state)
    state.waiting.shares.restore(*snapshot.shares)
    if state.drafting is not None and snapshot.drafting is not None:
        saved = snapshot.drafting
        state.drafting.restore(
            saved.costs, saved.hits, saved.tries, saved.recent_outputs, saved.output_lengths, saved.worth
        )
    if state.pace is not None and snapshot.pace is not None:
        state.pace.restore(snapshot.pace)


def _restore_fault_isolation(saved: SavedFaultIsolation, state: State) -> None:
    isolation = state.fault_isolation
    isolation.by_group = {
        group: Suspicion(num_failures=num_failures, cleared_at=dict(cleared_at))
        for group, (num_failures, cleared_at) in saved.by_group.items()
    }
    isolation.lost = {group: dict(choices) for group, choices in saved.lost.items()}
    isolation.is_isolating, isolation.alone = saved.is_isolating, saved.alone


def _restore_group(saved: SavedGroup, state: State) -> None:
    request = saved.request
    group = Group(
        request,
        eos_token_ids=state.settings.eos_token_ids,
        block_size=state.settings.block_size,
        cache_scope=state.prefix_cache.scope_of(request),
    )
    state.groups[group.number] = group
    if saved.is_queued:
        priority, arrival, _ = saved.sequences[0].order
        state.admission.enqueue(request, priority, arrival)
    if request.deadline is not None:
        state.deadlines.add(group.number, request.deadline)
    state.timelines.restore(group.number, request.request_id, saved.timeline, saved.num_timeline_entries_dropped)
    for each in saved.sequences:
        sequence = _restore_sequence(each, group)
        group.sequences[sequence.choice] = sequence
        if sequence.status is SequenceStatus.RUNNING:
            state.running.restore(sequence, is_decoding=each.is_decoding)
            if each.waits:
                state.decodes.wait(sequence)
            state.end_tokens.add(sequence.end_token_ids)
        else:
            state.waiting.push(sequence)


def _restore_sequence(saved: SavedSequence, group: Group) -> Sequence:
    sequence = Sequence(group, ChoiceStart(choice=saved.choice), saved.order)
    sequence.status = saved.status
    sequence.output_token_ids = array("i", saved.output_token_ids)
    sequence.num_cached_tokens = saved.num_cached_tokens
    sequence.num_tokens_when_preempted = saved.num_tokens_when_preempted
    sequence.row, sequence.generation, sequence.last_step = saved.row, saved.generation, saved.last_step
    sequence.block_ids = list(saved.block_ids)
    sequence.num_computed_tokens = saved.num_computed_tokens
    sequence.num_published_blocks = saved.num_published_blocks
    sequence.drafts = saved.drafts
    sequence.num_draft_tokens, sequence.num_accepted_tokens = saved.num_draft_tokens, saved.num_accepted_tokens
    sequence.host_blocks, sequence.num_swapped_tokens = list(saved.host_blocks), saved.num_swapped_tokens
    sequence.next_item, sequence.holds_item = saved.next_item, saved.holds_item
    return sequence


def _restore_step(saved: SavedStep, by_generation: dict[int, Sequence]) -> StepInFlight:
    num_drafts = saved.num_drafts or [0] * len(saved.generations)
    counts = [
        len(saved.drafts.get(each, ())) or count for each, count in zip(saved.generations, num_drafts, strict=True)
    ]
    return StepInFlight(
        step=saved.step,
        generations=np.array(saved.generations, np.int64),
        rows=np.array(saved.rows, np.uint16),
        positions=np.array(saved.positions, np.int64),
        # None: `Decodes.locate` finds them.
        decodes_version=None,
        num_drafts=np.array(counts, np.int64) if any(counts) else None,
        num_expected_drafts=saved.num_expected_drafts,
        has_forced=bool(saved.drafts),
        finishing=[(by_generation[generation], generation) for generation in saved.finishing],
        is_empty=saved.is_empty,
        num_prefill_tokens=saved.num_prefill_tokens,
        timing=saved.timing,
    )
