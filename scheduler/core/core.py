"""The scheduling core: which sequences compute how many tokens in each step, and in which blocks.

One rule, no prefill or decode phase: every sequence has num_computed_tokens, which each step lets catch up with
num_tokens (prompt, output and drafts). Chunked prefill, prefix caching, recompute after a preemption and speculation
all follow from it.

The core does no I/O and knows no clock: it is a deterministic function of the calls made to it.
"""

import dataclasses
from collections.abc import Collection

from scheduler.core.look import CoreLook, look
from scheduler.core.messages import (
    CacheEvent,
    CoreLoad,
    CoreSettings,
    CoreStats,
    FinishReason,
    GroupRequest,
    Moment,
    Plan,
    Preempted,
    Rejection,
    RejectReason,
    Result,
    SequenceEnd,
    SequenceKey,
    StepCosts,
    StepOutputs,
    Timeline,
    WantedItem,
)
from scheduler.core.pacer import Pacer
from scheduler.core.planner import Planner
from scheduler.core.policies import ORDER_POLICIES, age_of
from scheduler.core.results import Results, no_outputs
from scheduler.core.saved import Snapshot
from scheduler.core.snapshot import restore, save
from scheduler.core.speculation import Speculator
from scheduler.core.state.request import Group, Sequence
from scheduler.core.state.state import State


class Core:
    """Queues, rows and blocks of one replica.

    The caller may submit and cancel at any time. It passes the plans of `schedule` to the workers in order, and their
    results to `apply` in the same order. Times (`now`) are in seconds, all on one clock.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self._order = ORDER_POLICIES[settings.scheduling_policy]
        self._num_arrivals = 0
        self._state = State(settings)
        drafting = self._state.drafting
        speculator = None if drafting is None else Speculator(self._state, drafting)
        self._pacer = None if self._state.pace is None else Pacer(self._state, self._state.pace)
        self._planner = Planner(self._state, speculator, self._pacer)
        self._results = Results(self._state, speculator)

    # --- Requests come and go

    def submit(self, request: GroupRequest, now: float) -> Rejection | None:
        """Queues a group, or returns the reason for its rejection.

        `request.group` must not be live. A resumed choice that its tokens already end is not queued: `take_ends`
        returns its end. Under the policy `priority`, a full queue drops groups that have not begun to make room for one
        of higher priority: `take_displaced` returns them.
        """
        state = self._state
        assert request.group not in state.groups, f"group {request.group} is live"
        arrival = self._num_arrivals
        state.admission.age = age_of(now, self.settings)
        order = self._order(request, arrival, state.admission.age)
        rejection = state.admission.refuse(request)
        if rejection is not None and not (rejection.reason is RejectReason.QUEUE_FULL and self._make_way(request, now)):
            return rejection
        self._num_arrivals += 1
        group = Group(
            request,
            eos_token_ids=self.settings.eos_token_ids,
            block_size=self.settings.block_size,
            cache_scope=state.prefix_cache.scope_of(request),
        )
        for index, start in enumerate(request.choices):
            sequence = Sequence(group, start, (*order, index))
            if ending := sequence.ending():
                state.ends.append(sequence.end(*ending))
            else:
                group.sequences[start.choice] = sequence
        if not group.sequences:
            return None
        state.groups[request.group] = group
        state.admission.enqueue(request, *order)
        state.waiting.arrive(request)
        if request.deadline is not None:
            state.deadlines.add(request.group, request.deadline)
        state.timelines.begin(request.group, request.request_id)
        if request.items:
            state.items.add(group)
            # Asks for what it will need.
            state.has_items(next(iter(group.sequences.values())), is_first=False)
        for sequence in group.sequences.values():
            state.waiting.push(sequence)
            state.timelines.add(
                request.group, Moment.QUEUED, now, choice=sequence.choice, num_tokens=group.num_prompt_tokens
            )
        return None

    def _make_way(self, request: GroupRequest, now: float) -> bool:
        """Drops groups that have not begun from the queue, for one of higher priority. False if that is not enough."""
        state = self._state
        groups = state.admission.make_way(request)
        for group in groups:
            for sequence in list(state.groups[group].sequences.values()):
                state.retire(sequence, FinishReason.CANCELLED, now, cause="displaced by a higher priority")
        state.displaced += groups
        return bool(groups)

    def cancel(self, group: int, choices: Collection[int] | None, now: float, *, cause: str = "") -> list[SequenceEnd]:
        """Ends choices of a group (None: all), waiting or running, and frees their blocks at once.

        cause: a few words for `explain`. Returns the ends of those that were live; `apply` does not report them again.
        """
        found = self._state.groups.get(group)
        if found is None:
            return []
        live = [s for s in found.sequences.values() if choices is None or s.choice in choices]
        for sequence in live:
            self._state.retire(sequence, FinishReason.CANCELLED, now, cause=cause)
        return [sequence.end(FinishReason.CANCELLED) for sequence in live]

    def expire(self, now: float) -> list[SequenceEnd]:
        """Cancels every sequence whose deadline is not after `now`."""
        if now < self._state.deadlines.first:
            return []
        due = self._state.deadlines.take_due(now)
        return [end for group in due for end in self.cancel(group, None, now, cause="its deadline passed")]

    # --- Items

    @property
    def has_wanted_items(self) -> bool:
        """True if `take_wanted_items` may return some."""
        return bool(self._state.items.wanted)

    def take_wanted_items(self) -> list[WantedItem]:
        """Returns the items that the workers are to prepare, in this order. Call it after `submit` and `schedule`, once
        the workers are ready; they get the items after the plans made so far."""
        return self._state.items.take_wanted()

    def wants_item(self, number: int) -> bool:
        """True if a live group still waits for an item that `take_wanted_items` returned. If none does, and the item
        was not sent, call `item_failed`: the core forgets the item."""
        item = self._state.items.asked(number)
        return item is not None and item.num_needing > 0

    def item_prepared(self, number: int) -> None:
        """Notes that the workers, all ranks that encode, have prepared an item that `take_wanted_items` returned in
        this epoch."""
        item = self._state.items.asked(number)
        if item is not None:
            self._state.items.prepared(item)

    def item_failed(self, number: int, message: str, now: float) -> list[SequenceEnd]:
        """Notes that a rank can't prepare such an item. message: why, for the client.

        Returns the ends of the sequences that need it; `take_ends` does not report them.
        """
        return self._state.fail_item(number, message, now)

    # --- Steps

    def schedule(self, now: float) -> Plan | None:
        """Plans the next step: running sequences first, then waiting ones, within the token budget, rows and blocks.

        None if nothing can run now, or if max_steps_in_flight plans are in flight.
        """
        return self._planner.plan(now)

    def schedule_empty(self) -> Plan | None:
        """Plans a step that computes nothing, for a replica that must take part in the steps of other replicas.

        Call it when `schedule` returns None. None if max_steps_in_flight plans are in flight.
        """
        return self._planner.plan_empty()

    def apply(self, result: Result, now: float) -> StepOutputs:
        """Applies the result of the oldest plan in flight; returns its tokens and ends. Ignores any other step's."""
        awaited = self._state.in_flight.take(result.step)
        if awaited is None:
            return no_outputs()
        if self._pacer is not None:
            self._pacer.note_return(awaited, now)
        return self._results.apply(awaited, result, now)

    def set_costs(self, costs: StepCosts) -> None:
        """Takes what steps have cost lately. Call it now and then: it decides how many drafts pay."""
        if self._state.drafting is not None:
            self._state.drafting.costs.set(costs)

    def take_ends(self) -> list[SequenceEnd]:
        """Returns the ends since the last call that no step caused. Call after `submit`, `blame_step` and `resize`."""
        ends, self._state.ends = self._state.ends, []
        return ends

    def take_displaced(self) -> list[int]:
        """Returns the groups that others of higher priority have displaced from the queue since the last call.

        No other end is reported for them. Call it after `submit`.
        """
        displaced, self._state.displaced = self._state.displaced, []
        return displaced

    def take_events(self) -> list[Preempted]:
        """Returns the preemptions for lack of blocks since the last call."""
        events, self._state.preemptions = self._state.preemptions, []
        return events

    def key_of(self, generation: int) -> SequenceKey | None:
        """The sequence that has this row generation (`PlannedRow.sequence`); None if it is not running."""
        found = self._state.running.by_generation.get(generation)
        return found and found.key

    # --- Epochs

    def lose_workers(self, now: float) -> None:
        """Ends an epoch: running sequences wait again, plans in flight are void, rows and blocks are empty."""
        self._state.lose_workers(now)

    def blame_step(self, now: float) -> int:
        """Suspects the groups in the steps that were in flight. Returns how many are to be computed alone.

        Call it right after `lose_workers` if the workers failed or died. From now on, groups that were suspects twice
        in a row, with no progress in between, are computed alone, one after the other. A group that is alone when the
        workers fail again ends with ERROR (`take_ends`). `scheduler.core.state.fault_isolation` gives the reasons.
        """
        return self._state.blame_step(now)

    def resize(
        self, num_blocks: int, num_swap_blocks: int = 0, *, encoder_cache_size: int | None = None, now: float
    ) -> None:
        """Takes the block counts of a new epoch, right after `lose_workers`. encoder_cache_size: None: as before.

        Sequences that can no longer fit at all end with ERROR (`take_ends`).
        """
        if encoder_cache_size is None:
            encoder_cache_size = self.settings.encoder_cache_size
        self.settings = dataclasses.replace(
            self.settings,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            encoder_cache_size=encoder_cache_size,
        )
        self._state.resize(self.settings, now)

    # --- Prefix cache

    def reset_prefix_cache(self) -> int:
        """Hides all blocks computed so far from later sequences. Returns how many could be found."""
        return self._state.pool.unpublish_all()

    def watch_cache(self, enabled: bool, *, contents: bool = False) -> None:
        """Starts or stops keeping events for `take_cache_events`; the first ones list what can be found now. contents:
        they have the contents of blocks that are stored from now on."""
        self._state.pool.watch(enabled, contents=contents)

    def take_cache_events(self) -> list[CacheEvent]:
        """Returns the changes to the prefix cache since the last call, in order."""
        return self._state.pool.take_events()

    def cached_hashes(self) -> list[bytes]:
        """Hashes of the blocks that can be found now: for a watcher that joins while others watch already."""
        return self._state.pool.hashes

    # --- Snapshots

    def save(self) -> Snapshot:
        """The state between two calls, without `sampling`. Time and size: see `scheduler.core.snapshot.save`."""
        return save(self._state, self._num_arrivals)

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from the saved state of a core with the same settings: the same calls lead to the same plans.

        This core must be new. Raises AssertionError or KeyError if the snapshot contradicts itself.
        """
        assert snapshot.settings == self.settings, "the snapshot is of a core with other settings"
        restore(snapshot, self._state)
        self._num_arrivals = snapshot.num_arrivals
        self.check_integrity()

    # --- Observation

    @property
    def has_work(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self._state.groups)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._state.in_flight)

    def is_queued(self, group: int) -> bool:
        """True if a live group waits for its first run."""
        return self._state.admission.is_queued(group)

    def timeline(self, group: int) -> Timeline | None:
        """The timeline of a live or recently finished group; None if it is not known."""
        return self._state.timelines.of(group)

    def explain(self, request_id: str) -> list[Timeline]:
        """The timelines of the live and recently finished requests with this id, oldest first."""
        return self._state.timelines.explain(request_id)

    def look(self) -> CoreLook:
        """Its sequences and blocks, for people who watch it."""
        return look(self._state)

    @property
    def load(self) -> CoreLoad:
        state = self._state
        return CoreLoad(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_free_blocks=state.pool.num_available,
            num_blocks=state.pool.num_blocks,
            num_queued_tokens=state.admission.num_queued_tokens,
            num_prefill_tokens=state.running.num_prefill_tokens + state.in_flight.num_prefill_tokens,
            num_free_swap_blocks=state.host_blocks.num_free,
            refused_priority=state.admission.refused_priority,
            refused_tenants=state.admission.refused_tenants,
        )

    @property
    def stats(self) -> CoreStats:
        return dataclasses.replace(self._state.stats)

    def check_integrity(self) -> None:
        """Asserts that all counts kept in two places agree. Slow: for tests, and when idle."""
        self._state.check_integrity()
