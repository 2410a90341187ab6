"""Invariants of a core and its worker: at any time, right after a plan, and when nothing is left to do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from scheduler.core.messages import ANY_PRIORITY, Moment
from tests.properties import inside
from tests.properties.admission import has_used_up_its_share
from tests.properties.items import check_items
from tests.properties.model import age_of

if TYPE_CHECKING:
    from tests.properties.world import World


def check(world: World) -> None:
    """Checks what must hold at any time."""
    core = world.core
    core.check_integrity()
    load, stats, num_running = core.load, core.stats, len(world.by_generation)
    assert core.has_work == bool(world.live)
    assert core.num_steps_in_flight == len(world.in_flight)
    assert (load.num_running, load.num_waiting) == (num_running, len(world.live) - num_running)
    assert load.num_queued_tokens == sum(len(request.prompt_token_ids) for request in world.queued.values())
    assert load.num_blocks == world.worker.num_blocks
    _check_refused_priorities(world)
    tables = inside.tables(core)
    assert tables.keys() == {sequence.key for sequence in world.by_generation.values()}
    held = {block for table in tables.values() for block in table.block_ids}
    assert load.num_free_blocks == load.num_blocks - len(held), "blocks are lost"
    num_empty = world.seen["an empty step"]
    assert (stats.num_output_tokens, stats.num_preemptions, stats.num_steps, stats.num_empty_steps) == (
        world.num_output_tokens,
        world.num_preemptions,
        world.num_plans + num_empty,
        num_empty,
    )
    by_position = stats.num_accepted_by_position
    assert sorted(by_position, reverse=True) == list(by_position), "a draft counts as accepted, but not those before it"
    assert sum(by_position) <= stats.num_speculated_tokens <= stats.num_draft_tokens
    assert not core.take_ends()
    assert not core.take_displaced()
    events = core.take_cache_events()
    if world.mirror is None:
        assert not events
    else:
        world.seen["cache events"] += len(events)
        world.mirror.take(events)
        assert world.mirror.names == inside.names(core), "the events do not match the cache"


def _check_refused_priorities(world: World) -> None:
    """They are set only while requests of this priority would be refused, and those of higher priority would displace
    others."""
    settings, load, queued = world.settings, world.core.load, list(world.queued.values())
    num_tokens = sum(len(request.prompt_token_ids) for request in queued)
    is_full = len(queued) >= settings.max_queued_requests or num_tokens >= settings.max_queued_tokens
    assert load.refused_priority == (_refused_priority(world, "") if is_full else None)
    weights = {request.tenant: request.weight for request in queued if request.tenant}
    assert dict(load.refused_tenants) == {
        tenant: _refused_priority(world, tenant)
        for tenant, weight in weights.items()
        if has_used_up_its_share(world, tenant, weight)
    }


def _refused_priority(world: World, tenant: str) -> int:
    waiting = [
        sequence.order[0]
        for sequence in world.live.values()
        if sequence.tenant == tenant
        and sequence.request.group in world.queued
        and not any(start.output_token_ids for start in sequence.request.choices)
    ]
    if not waiting or world.settings.scheduling_policy != "priority":
        return ANY_PRIORITY
    return int(max(waiting)) - age_of(world.settings, world.last_submitted_at)


def check_tables(world: World) -> None:
    """Right after a plan the worker's tables, built from differences, equal the core's."""
    check_items(world)
    drafting = {row for flight in world.in_flight for row, _ in flight.plan.drafts}
    for key, table in inside.tables(world.core).items():
        row = world.worker.rows[table.row]
        assert row.sequence == table.generation == world.live[key].generation
        assert row.block_ids == table.block_ids, f"{key}: the worker's table differs from the core's"
        if not row.has_failed and table.row not in drafting:
            assert row.num_computed_tokens == table.num_computed_tokens, f"{key}: num_computed_tokens differs"
        known = world.live[key].request.prompt_token_ids + tuple(world.live[key].tokens)
        assert tuple(row.token_ids[: len(known)]) == known


def check_idle(world: World) -> None:
    """When no sequence is live, no resource is held."""
    load = world.core.load
    assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
    assert load.num_free_blocks == load.num_blocks
    assert load.num_free_swap_blocks == world.worker.num_swap_blocks
    assert world.core.num_steps_in_flight == 0
    embeddings, inputs = inside.items(world.core)
    assert embeddings == world.worker.embeddings.keys()
    # What is not needed any more is told with the next plan.
    assert inputs == world.worker.inputs.keys() <= inside.forgotten(world.core) | world.unanswered
    for group in world.finished_groups:
        _check_timeline(world, group)


def _check_timeline(world: World, group: int) -> None:
    (timeline,) = world.core.explain(f"request-{group}")
    assert timeline.is_finished
    moments = [entry.moment for entry in timeline.entries]
    assert moments[0] is Moment.QUEUED
    assert moments[-1] is Moment.FINISHED
    times = [entry.time for entry in timeline.entries]
    assert times == sorted(times)
    if not timeline.num_dropped:
        count = Counter(moments)
        assert count[Moment.RESUMED] <= count[Moment.PREEMPTED]
        assert bool(count[Moment.SCHEDULED] or count[Moment.CHUNKED]) == bool(count[Moment.ADMITTED])
        world.seen["timelines checked"] += 1
