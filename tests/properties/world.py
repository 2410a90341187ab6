"""A core, its worker, and what must hold for both after any sequence of events.

`World` calls the core as its callers do, in any order that its driver chooses, and predicts the results: each
sequence's output and its place in the order are known when it is submitted. Every action asserts that the core's
answer is the only right one under its contract; `tests.properties.plan_checks` does so for plans, and
`tests.properties.state_checks` for what must be true at any time.
"""

from collections import Counter, deque
from collections.abc import Collection
from random import Random

from scheduler.core.core import Core
from scheduler.core.messages import (
    CoreSettings,
    FinishReason,
    GroupRequest,
    Plan,
    Preempted,
    RejectReason,
    Result,
    SequenceEnd,
    SequenceKey,
)
from scheduler.core.state.blocks import num_blocks_for
from tests.fakes.model import Output, outputs_alone
from tests.fakes.plan_worker import Drafter, PlanWorker
from tests.properties import inside
from tests.properties.admission import is_full, is_valid, making_way
from tests.properties.features import count_plan
from tests.properties.items import answer_item, take_wanted
from tests.properties.model import Flight, ModelSequence, bound_plans, plans_between, sequences_of, stay_of
from tests.properties.plan_checks import check_empty_plan, check_found_blocks, check_no_plan, check_plan, rest_of_batch
from tests.properties.results import expect, take_outputs, with_strays, without
from tests.properties.state_checks import check, check_idle, check_tables

ERROR, CANCELLED = FinishReason.ERROR, FinishReason.CANCELLED


class World:
    """Group numbers count from 1."""

    def __init__(
        self, settings: CoreSettings, *, core_class: type[Core] = Core, seed: int = 0, diligence: float = 1.0
    ) -> None:
        """core_class: the core to drive, such as one with a bug. seed: decides what fails.

        diligence: share of steps after which the core's private state is checked, which brings lazy parts up to date.
        """
        self.settings = settings
        self.core = core_class(settings)
        self.worker = self._make_worker(settings.num_blocks, settings.num_swap_blocks)
        self.now = self.last_submitted_at = 0.0
        # How often each kind of event has happened.
        self.seen: Counter[str] = Counter()
        self.num_plans = 0
        self.live: dict[SequenceKey, ModelSequence] = {}
        # Running sequences.
        self.by_generation: dict[int, ModelSequence] = {}
        self.in_flight: deque[Flight] = deque()
        # Rows that the next plan must free.
        self.rows_to_free: set[int] = set()
        # Rows that a sequence left, and the last plan in flight at that time: the row rests until its result.
        self.resting_rows: dict[int, int] = {}
        self.num_groups = 0
        self.queued: dict[int, GroupRequest] = {}  # groups that have never run
        self.mirror: inside.CacheMirror | None = None
        # In the current step: a suspect runs alone, a sequence has lost its blocks.
        self.is_isolating = self.has_preempted = False
        # Blocks of sequences that are known to have failed: no request may find them until they are written anew.
        self.spoiled: set[int] = set()
        # Numbers of items that the worker has not prepared yet.
        self.unanswered: set[int] = set()
        self._guess = Random(seed)
        self._diligence = diligence
        self._groups: dict[int, list[ModelSequence]] = {}
        self.finished_groups: deque[int] = deque(maxlen=settings.max_finished_timelines)
        self.num_output_tokens = 0
        self.num_preemptions = 0

    def _make_worker(self, num_blocks: int, num_swap_blocks: int) -> PlanWorker:
        return PlanWorker(
            block_size=self.settings.block_size,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            encoder_cache_size=self.settings.encoder_cache_size,
        )

    @property
    def waiting(self) -> list[ModelSequence]:
        return [sequence for sequence in self.live.values() if not sequence.is_running]

    # --- Requests

    def submit(self, request: GroupRequest) -> None:
        """Submits a group. `request.group` must be the next number."""
        self.num_groups, self.last_submitted_at = self.num_groups + 1, self.now
        assert request.group == self.num_groups
        valid, full = is_valid(self, request), is_full(self, request)
        displaced = making_way(self, request) if valid and full else []
        rejection = self.core.submit(request, self.now)
        assert self.core.take_displaced() == displaced, "not the groups that had to make way"
        for group in displaced:
            self._displace(group)
        if rejection is not None:
            assert not valid or (full and not displaced), f"refused without need: {rejection.message}"
            assert (rejection.reason is RejectReason.QUEUE_FULL) == valid
            self.seen[f"refused: {rejection.reason.value}"] += 1
            assert not self.core.take_ends()
            return
        assert valid, "accepted, although it can't run"
        assert not full or displaced, "accepted, although the queue is full"
        self._add(request, outputs_alone(request, self.settings.eos_token_ids))
        take_wanted(self)

    def _add(self, request: GroupRequest, outputs: dict[int, Output]) -> None:
        members = sequences_of(self.settings, request, outputs, self.now)
        over = [each for each in members if len(each.tokens) >= len(each.expected.token_ids)]
        self.live |= {sequence.key: sequence for sequence in members}
        self._take_ends(self.core.take_ends(), [(each, each.expected.reason) for each in over])
        members = [sequence for sequence in members if sequence.is_live]
        if members:
            self._groups[request.group] = members
            self.queued[request.group] = request
        self.seen["several choices"] += len(members) > 1
        self.seen["resumed by a client"] += any(sequence.start.output_token_ids for sequence in members)
        self.seen["ended at once"] += len(over)
        bound_plans(self.settings, list(self.live.values()), members, self.num_plans)

    def _displace(self, group: int) -> None:
        """Removes a group that made way for another; its sequences get no end."""
        for sequence in self._groups.pop(group):
            self.live.pop(sequence.key, None)
            sequence.is_live = False
        del self.queued[group]
        self.finished_groups.append(group)
        self.seen["displaced"] += 1

    def cancel(self, group: int, choices: Collection[int] | None) -> None:
        gone = [s for key, s in self.live.items() if key[0] == group and (choices is None or key[1] in choices)]
        for sequence in gone:
            state = "swapped" if sequence.is_swapped else "running" if sequence.is_running else "waiting"
            self.seen[f"cancelled: {'preempted' if state == 'waiting' and sequence.has_run else state}"] += 1
        self._take_ends(self.core.cancel(group, choices, self.now), [(each, CANCELLED) for each in gone])

    def pass_time(self, seconds: float) -> None:
        """Moves the clock on; deadlines may pass."""
        self.now += seconds
        due = [
            sequence
            for sequence in self.live.values()
            if sequence.request.deadline is not None and sequence.request.deadline <= self.now
        ]
        self.seen["past a deadline"] += len(due)
        self._take_ends(self.core.expire(self.now), [(each, CANCELLED) for each in due])

    # --- Steps

    def schedule(self, *, failing: bool = False, drafter: Drafter | None = None) -> bool:
        """Schedules and runs a step. Returns False if there was no plan. failing: one sequence that samples fails."""
        self.is_isolating = inside.is_isolating(self.core)
        plan = self.core.schedule(self.now)
        self.is_isolating |= inside.is_isolating(self.core)
        preemptions = self.core.take_events()
        for event in preemptions:
            self._take_preemption(event)
        self._set_aside()
        self.has_preempted = bool(preemptions)
        if plan is None:
            take_wanted(self)
            check_no_plan(self, has_preempted=self.has_preempted)
            return False
        self.num_plans += 1
        for sequence in self.live.values():
            # While items are prepared, others go first.
            sequence.last_plan += bool(self.unanswered)
        overtaken = check_plan(self, plan)
        self.seen["a long prefill was passed"] += overtaken
        self.rows_to_free.clear()
        for planned in plan.new_rows:
            key = self.core.key_of(planned.sequence)
            assert key in self.live, "a row for a sequence that is not live"
            self._take_row(self.live[key], planned.row, planned.sequence, planned.num_computed_tokens, plan)
        numbers = [planned.sequence for planned in plan.new_rows] or list(self.by_generation)
        result = self.worker.run(plan, failing=[self._guess.choice(numbers)] if failing else (), drafter=drafter)
        take_wanted(self)
        self.spoiled -= self.worker.renewed
        check_found_blocks(self, plan)
        self.in_flight.append(Flight(plan, result, frozenset(dict(plan.batch))))
        count_plan(self, plan, result)
        late = [sequence.key for sequence in self.live.values() if self.num_plans > sequence.last_plan]
        if self.settings.preemption_policy == "whole_context":
            assert not late, f"{late} should have ended by now"
        if self._guess.random() < self._diligence:
            check(self)
            check_tables(self)
        return True

    def schedule_empty(self) -> bool:
        """Schedules an empty step, after `schedule` gave no plan or at any other time. Returns False without a plan."""
        plan = self.core.schedule_empty()
        check_empty_plan(self, plan)
        if plan is None:
            return False
        self.rows_to_free.clear()
        self.in_flight.append(Flight(plan, self.worker.run(plan), frozenset()))
        self.seen.update({"an empty step": 1, "an empty step that frees rows": bool(plan.freed_rows)})
        return True

    def _take_row(self, sequence: ModelSequence, row: int, generation: int, num_computed: int, plan: Plan) -> None:
        assert not sequence.is_running, "a second row for one sequence"
        if not sequence.has_run:
            sequence.has_run = True
            sequence.num_cached_tokens = min(num_computed, len(sequence.request.prompt_token_ids))
            self.queued.pop(sequence.request.group, None)
            self.seen["prefix hit"] += num_computed > 0
        elif sequence.is_swapped:
            self.seen["swapped in"] += bool(plan.swapped_in)
        else:
            self.seen["came back"] += 1
            self.seen["prefix hit after a preemption"] += num_computed > 0
        first = sequence.request.choices[0].choice
        if sequence.request.bypass_prefix_cache and sequence.start.choice == first and not sequence.tokens:
            assert num_computed == 0 or sequence.is_swapped, "prompt logprobs were wanted"
            self.seen["bypassed the prefix cache"] += 1
        sequence.is_swapped = False
        sequence.row, sequence.generation = row, generation
        self.by_generation[generation] = sequence

    def _take_preemption(self, event: Preempted) -> None:
        self.num_preemptions += 1
        assert event.num_preemptions == self.num_preemptions
        sequence = self.live[event.key]
        assert sequence.is_running, "preempted without a row"
        assert event.request_id == sequence.request.request_id
        assert sequence.generation is not None
        assert sequence.row is not None
        if self.settings.preemption_policy == "whole_context":
            assert len(sequence.tokens) > sequence.num_tokens_when_preempted, "preempted twice without progress"
        sequence.num_tokens_when_preempted = len(sequence.tokens)
        sequence.num_preemptions += 1
        sequence.is_swapped = event.swapped
        self.seen["swapped out" if event.swapped else "preempted"] += 1
        self.seen["preempted with a result in flight"] += any(sequence.row in each.rows for each in self.in_flight)
        self._leave_row(sequence)
        later = [each for each in self.by_generation.values() if each.order > sequence.order and not each.is_protected]
        assert not later or self.settings.preemption_policy != "whole_context", "preempted before later ones"

    def _set_aside(self) -> None:
        """Takes the rows of sequences set aside for a suspect: no event reports these."""
        for number, sequence in list(self.by_generation.items()):
            if self.core.key_of(number) is None:
                assert self.is_isolating, "a sequence lost its row without being preempted"
                sequence.is_swapped = self.settings.preemption_mode == "swap"
                self._leave_row(sequence)
                self.seen["set aside for a suspect"] += 1

    def _leave_row(self, sequence: ModelSequence) -> None:
        assert sequence.generation is not None
        assert sequence.row is not None
        del self.by_generation[sequence.generation]
        self.rows_to_free.add(sequence.row)
        if self.in_flight:
            self.resting_rows[sequence.row] = self.in_flight[-1].plan.step
        sequence.leave_row()

    def deliver(self, *, forget: bool = False, strays: bool = False) -> None:
        """Delivers the oldest result. forget: drop one of its sequences. strays: add sequences that do not exist."""
        flight = self.in_flight.popleft()
        result, step = flight.result, flight.plan.step
        self.resting_rows = {row: last for row, last in self.resting_rows.items() if last > step}
        if forget and len(result.sequences):
            result = without(result, self._guess.randrange(len(result.sequences)))
        if strays:
            result = with_strays(result)
        expected_tokens, expected_ends = expect(self, flight, result)
        outputs = self.core.apply(result, self.now)
        take_outputs(self, outputs, expected_tokens)
        self._take_ends(outputs.ends, expected_ends)
        if self._guess.random() < self._diligence:
            check(self)

    def answer_item(self, number: int, *, failing: bool = False) -> None:
        """Says that the worker has prepared an item, or can't."""
        self._take_ends(*answer_item(self, number, failing=failing))

    def deliver_again(self, results: list[Result]) -> None:
        """Delivers results again. Those of plans that are not the oldest in flight must have no effect."""
        for result in results:
            if not self.in_flight or result.step != self.in_flight[0].plan.step:
                outputs = self.core.apply(result, self.now)
                assert not len(outputs.token_ids), "a stale result counts"
                assert not outputs.ends, "a stale result ends a sequence"
                self.seen["stale results"] += 1

    # --- What comes of it

    def _take_ends(self, ends: list[SequenceEnd], expected: list[tuple[ModelSequence, FinishReason]]) -> None:
        assert sorted((end.key, end.reason.value) for end in ends) == sorted(
            (sequence.key, reason.value) for sequence, reason in expected
        ), "not the expected ends"
        for end in ends:
            sequence = self.live.pop(end.key)
            sequence.is_live = False
            assert end.num_cached_tokens == sequence.num_cached_tokens
            if end.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION):
                assert sequence.tokens == sequence.expected.token_ids
                assert end.stop_token_id == sequence.expected.stop_token_id
            else:
                assert end.stop_token_id is None
            assert bool(end.message) == (end.reason is ERROR)
            if sequence.is_running:
                self._leave_row(sequence)
            group = sequence.request.group
            if group in self._groups and not any(each.is_live for each in self._groups[group]):
                del self._groups[group]
                self.queued.pop(group, None)
                self.finished_groups.append(group)

    # --- Epochs and the prefix cache

    def lose_workers(
        self, num_blocks: int | None = None, num_swap_blocks: int = 0, *, has_failed: bool = False
    ) -> None:
        """Ends an epoch. num_blocks: the next epoch's, if known. has_failed: a step may be the reason."""
        stale = [flight.result for flight in self.in_flight]
        self.core.lose_workers(self.now)
        assert not self.core.take_events(), "a loss of workers counts as a preemption"
        self.in_flight.clear()
        self.by_generation.clear()
        self.rows_to_free.clear()
        self.resting_rows.clear()
        self.spoiled.clear()
        self.unanswered.clear()
        assert not self.core.take_wanted_items(), "items of the last epoch are wanted"
        for sequence in self.live.values():
            sequence.leave_row()
            sequence.is_swapped = False
        if has_failed:
            self._blame()
        if num_blocks is not None:
            self.core.resize(num_blocks, num_swap_blocks, now=self.now)
            too_long = [
                (sequence, ERROR)
                for sequence in self.live.values()
                if num_blocks_for(sequence.max_num_tokens - 1, self.settings.block_size) > num_blocks
            ]
            self.seen["too long for the new blocks"] += len(too_long)
            self._take_ends(self.core.take_ends(), too_long)
            self.worker = self._make_worker(num_blocks, num_swap_blocks)
        else:
            self.worker = self._make_worker(self.worker.num_blocks, self.worker.num_swap_blocks)
        again = sum(stay_of(sequence, self.settings) for sequence in self.live.values())
        for sequence in self.live.values():
            # Suspects run one after the other; each may cost one stay of every sequence.
            times = len(self.live) if has_failed else 1
            sequence.last_plan += plans_between(self.settings) * again * times
        self.seen["workers lost"] += 1
        check(self)
        self.deliver_again(stale)

    def _blame(self) -> None:
        num_suspects = self.core.blame_step(self.now)
        self.seen["suspects"] += num_suspects > 0
        ends = self.core.take_ends()
        culprits = {end.key[0] for end in ends}
        assert len(culprits) <= 1, "more than one is blamed"
        self.seen["blamed"] += len(culprits)
        self._take_ends(ends, [(sequence, ERROR) for key, sequence in self.live.items() if key[0] in culprits])

    def reset_prefix_cache(self) -> None:
        known = inside.names(self.core)
        assert self.core.reset_prefix_cache() == len(known)
        assert not inside.names(self.core)
        self.seen["prefix cache reset"] += len(known) > 0
        check(self)

    def watch_cache(self, enabled: bool) -> None:
        self.core.watch_cache(enabled)
        self.mirror = inside.CacheMirror() if enabled else None

    # --- To the end

    def drain(self) -> None:
        """Runs until nothing is left, which takes a bounded number of plans."""
        remaining = rest_of_batch(self)
        while self.live or self.in_flight:
            for number in sorted(self.unanswered):
                self.answer_item(number)
            if self.schedule():
                remaining -= 1
                assert remaining >= 0 or self.settings.preemption_policy != "whole_context", "no end in sight"
            elif not self.unanswered:
                self.deliver()
        check_idle(self)
