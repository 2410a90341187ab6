"""The scheduling core: which sequences compute how many tokens in each step, and in which blocks.

One rule, no prefill or decode phase: every sequence has num_computed_tokens, which each step lets catch up with
num_tokens (prompt and output). Chunked prefill, prefix caching and recompute after a preemption all follow from it.

The core does no I/O and knows no clock: it is a deterministic function of the calls made to it.
"""

import dataclasses
from collections.abc import Collection

from scheduler.admission import Admission
from scheduler.block_pool import BlockPool, num_blocks_for
from scheduler.deadlines import Deadlines
from scheduler.messages import (
    CoreLoad,
    CoreSettings,
    CoreStats,
    FinishReason,
    GroupRequest,
    Plan,
    Preempted,
    Rejection,
    Result,
    SequenceKey,
    SequenceOutput,
)
from scheduler.plan import PlanDraft
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Group, Sequence, SequenceStatus
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.waiting import POLICIES, WaitingQueue


class Core:
    """Queues, rows and blocks of one replica.

    The caller submits and cancels at any time, and in turn calls `schedule`, has the workers compute the plan, and
    hands its result to `apply`. One plan is in flight at most. Times (`now`) are in seconds, on any one clock.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        self._policy = POLICIES[settings.scheduling_policy]
        self._admission = Admission(settings)
        self._pool = BlockPool(settings.num_blocks, keep_unused=settings.enable_prefix_caching)
        self._prefix_cache = PrefixCache(self._pool, settings.block_size, enabled=settings.enable_prefix_caching)
        self._rows = Rows(settings.max_num_seqs)
        self._running = Running(self._rows, self._pool)
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._groups: dict[int, Group] = {}
        self._num_arrivals = 0
        self._in_flight: Plan | None = None
        self._awaited: dict[int, Sequence] = {}  # whom the plan in flight samples for, by number
        self._outputs: list[SequenceOutput] = []
        self._events: list[Preempted] = []
        self._stats = CoreStats()

    # --- Requests come and go

    def submit(self, request: GroupRequest, now: float) -> Rejection | None:
        """Queues a group, or says why not.

        `request.group` must not be live. Resumed choices whose tokens end them already are not queued: their end comes
        from `take_outputs`.
        """
        assert request.group not in self._groups, f"group {request.group} is live"
        if rejection := self._admission.refuse(request):
            return rejection
        order = self._policy(request, self._num_arrivals)
        self._num_arrivals += 1
        group = Group(
            request,
            eos_token_ids=self._settings.eos_token_ids,
            block_size=self._settings.block_size,
            cache_scope=self._prefix_cache.scope_of(request),
        )
        for index, start in enumerate(request.choices):
            sequence = Sequence(group, start, (*order, index))
            if ending := sequence.ending():
                self._outputs.append(sequence.end_output(*ending))
            else:
                group.sequences[start.choice] = sequence
        if not group.sequences:
            return None
        self._groups[request.group] = group
        self._admission.enqueue(request)
        if request.deadline is not None:
            self._deadlines.add(request.group, request.deadline)
        for sequence in group.sequences.values():
            self._waiting.push(sequence)
        return None

    def cancel(self, group: int, choices: Collection[int] | None, now: float) -> list[SequenceKey]:
        """Ends sequences of a group (None: all), wherever they are, and frees their blocks at once.

        Returns those that were live; `apply` says nothing of them any more.
        """
        found = self._groups.get(group)
        if found is None:
            return []
        live = [s for s in found.sequences.values() if choices is None or s.choice in choices]
        for sequence in live:
            self._retire(sequence)
        return [sequence.key for sequence in live]

    def expire(self, now: float) -> list[SequenceKey]:
        """Cancels every sequence whose deadline is not after `now`, and returns their keys."""
        return [key for group in self._deadlines.take_due(now) for key in self.cancel(group, None, now)]

    # --- Steps

    def schedule(self, now: float) -> Plan | None:
        """The next step: what runs goes on, then what waits comes in, within the token budget, rows and blocks.

        None if nothing can run; rows freed meanwhile are told with the next plan. The plan before must have been
        applied, or lost with its workers.
        """
        assert self._in_flight is None, "one plan is in flight at most"
        draft = PlanDraft(self._settings.max_num_batched_tokens)
        self._continue_running(draft)
        # Whoever was preempted needs the room more than whoever waits.
        if not draft.has_preempted:
            self._admit_waiting(draft)
        plan = draft.plan
        if not plan.scheduled:
            return None
        plan.freed_rows = self._rows.take_freed()
        self._in_flight, self._awaited = plan, draft.awaited
        self._stats.num_steps += 1
        return plan

    def _continue_running(self, draft: PlanDraft) -> None:
        """One token for each that lacks one, then chunks for those that lack more, each in order."""
        block_size, scheduled, awaited = self._settings.block_size, draft.plan.scheduled, draft.awaited
        last_offset, budget = block_size - 1, draft.budget
        chunked: list[Sequence] = []
        # The loop that every token passes: PlanDraft.schedule is written out for a count of 1. Preemption pops from
        # the end of the list, which is well defined, and nobody behind has been scheduled yet.
        for sequence in self._running.sequences:
            if not budget:
                break
            computed = sequence.num_computed_tokens
            if sequence.num_prompt_tokens + len(sequence.output_token_ids) - computed > 1:
                chunked.append(sequence)
                continue
            offset = computed % block_size
            if not offset and not self._grow(sequence, computed + 1, draft):
                break
            if offset == last_offset:
                draft.filled.append(sequence)
            scheduled.append((sequence.row, 1))
            awaited[sequence.number] = sequence
            sequence.num_computed_tokens = computed + 1
            budget -= 1
        draft.budget = budget
        for sequence in chunked:
            # One preempted for another's sake stands at the end: so does all that follows it.
            if not draft.budget or sequence.status is not SequenceStatus.RUNNING:
                break
            count = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
            if not self._grow(sequence, sequence.num_computed_tokens + count, draft):
                break
            draft.filled.append(sequence)
            draft.schedule(sequence, count)
        for sequence in draft.filled:
            self._prefix_cache.publish(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Gives a running sequence blocks for so many tokens, at the cost of the last in order.

        False if that was the sequence itself. The first in order always gets them: alone, it fits.
        """
        missing = num_blocks_for(num_tokens, self._settings.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        while self._pool.num_available < missing:
            victim = self._running.sequences[-1]
            draft.withdraw(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        blocks = self._pool.take(missing)
        sequence.block_ids += blocks
        draft.plan.grown_rows.append((sequence.row, blocks))
        return True

    def _admit_waiting(self, draft: PlanDraft) -> None:
        """Lets in what waits, strictly in order: nobody overtakes one that needs more room.

        Choices of one group need nothing else to compute their prompt once. While the first of them is at it, it takes
        all the budget there is; when the next is looked at, the first has published the prompt's blocks, or has gone.
        """
        block_size = self._settings.block_size
        while draft.budget and self._rows.num_free and (sequence := self._waiting.peek()) is not None:
            shared = self._prefix_cache.match(sequence)
            num_computed = len(shared) * block_size
            count = min(sequence.num_tokens - num_computed, draft.budget)
            # A new one grows chunk by chunk. One that was preempted takes all it needs to get where it was, or it
            # might lose it again on the way there, time after time.
            is_new = sequence.status is SequenceStatus.WAITING
            num_tokens = num_computed + count if is_new else sequence.num_tokens
            num_missing = num_blocks_for(num_tokens, block_size) - len(shared)
            if not self._pool.fits(shared, num_missing):
                return
            self._waiting.pop()
            if is_new:
                self._count_first_run(sequence, num_computed)
            self._pool.hold(shared)
            self._running.start(sequence, shared + self._pool.take(num_missing), num_computed)
            sequence.num_published_blocks = len(shared)
            draft.add_row(sequence)
            draft.schedule(sequence, count)
            self._prefix_cache.publish(sequence)

    def apply(self, plan: Plan, result: Result, now: float) -> list[SequenceOutput]:
        """What a plan's result means: tokens and ends, one output a sequence at most.

        A plan that is not in flight (its workers were lost) is ignored, and so is what the result says of sequences
        that are gone, or at another position than theirs. A sequence that should have got a token and did not ends with
        ERROR, for the workers no longer agree with the core about it.
        """
        if plan is not self._in_flight:
            return []
        self._in_flight = None
        awaited, outputs = self._awaited, []
        for number in sorted(result.failed):
            if sequence := self._running.by_number.get(number):
                outputs.append(self._fail(sequence, "the model's logits were not finite"))
        num_failed = len(outputs)
        for sampled in result.sampled:
            sequence = awaited.get(sampled.sequence)
            if sequence is None:
                continue
            position = len(sequence.output_token_ids)
            if sampled.position != position:
                continue
            del awaited[sampled.sequence]
            token = sampled.token_id
            sequence.output_token_ids.append(token)
            output = SequenceOutput(
                key=sequence.key,
                first_token=position,
                token_ids=[token],
                logprobs=[] if sampled.logprobs is None else [sampled.logprobs],
                num_cached_tokens=sequence.num_cached_tokens,
            )
            outputs.append(output)
            # Most tokens end nothing: the rules are asked only about those that might.
            may_end = token in sequence.end_token_ids or position + 1 >= sequence.max_tokens
            if may_end and (ending := sequence.ending()):
                output.finish_reason, output.stop_token_id = ending
                self._retire(sequence)
        self._stats.num_output_tokens += len(outputs) - num_failed
        for sequence in list(awaited.values()):
            outputs.append(self._fail(sequence, "the workers returned no token for it"))
        return outputs

    def take_outputs(self) -> list[SequenceOutput]:
        """Ends that no step brought about, since the last call: to be asked for after `submit` and after `resize`."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_events(self) -> list[Preempted]:
        """Preemptions for want of blocks since the last call."""
        events, self._events = self._events, []
        return events

    def key_of(self, sequence: int) -> SequenceKey | None:
        """Whose number in plans and results this is; None if it does not run (any more)."""
        found = self._running.by_number.get(sequence)
        return found and found.key

    # --- Epochs

    def lose_workers(self, now: float) -> None:
        """An epoch has ended: all that runs waits again, the plan in flight is void, rows and blocks hold nothing."""
        for sequence in self._running.forget():
            sequence.preempt()
            self._waiting.push(sequence)
        self._awaited = {}
        self._in_flight = None

    def resize(self, num_blocks: int) -> None:
        """Takes the block count of a new epoch, right after `lose_workers`.

        Sequences that can't ever fit any more end with ERROR, told by `take_outputs`.
        """
        assert not len(self._running), "blocks are in use"
        self._settings = self._admission.settings = dataclasses.replace(self._settings, num_blocks=num_blocks)
        self._pool.reset(num_blocks)
        block_size = self._settings.block_size
        for sequence in [s for group in self._groups.values() for s in group.sequences.values()]:
            needed = num_blocks_for(sequence.max_num_tokens_with_kv, block_size)
            if needed > num_blocks:
                message = f"it may need {needed} KV blocks, but the workers now have {num_blocks}: lower max_tokens"
                self._outputs.append(self._fail(sequence, message))

    # --- What it looks like

    @property
    def has_work(self) -> bool:
        """Something waits or runs."""
        return bool(self._groups)

    @property
    def load(self) -> CoreLoad:
        return CoreLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_available,
            num_blocks=self._pool.num_blocks,
            num_queued_tokens=self._admission.num_queued_tokens,
        )

    @property
    def stats(self) -> CoreStats:
        return dataclasses.replace(self._stats)

    def check_integrity(self) -> None:
        """Asserts that everything counted in two places is counted alike. Slow: for tests, and when idle."""
        self._running.check_integrity()
        live = [sequence for group in self._groups.values() for sequence in group.sequences.values()]
        assert len(live) == len(self._running) + len(self._waiting)
        for sequence in live:
            is_running = sequence.status is SequenceStatus.RUNNING
            assert is_running == (self._running.by_number.get(sequence.number) is sequence) == bool(sequence.block_ids)
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self._settings.block_size
            assert sequence.num_computed_tokens <= sequence.num_tokens
        assert all(group.sequences for group in self._groups.values()), "a group has no sequence left"
        assert self._awaited.keys() <= self._running.by_number.keys()

    # --- Transitions

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.preempt()
        self._waiting.push(sequence)
        self._stats.num_preemptions += 1
        self._events.append(
            Preempted(
                key=sequence.key,
                request_id=sequence.group.request.request_id,
                num_preemptions=self._stats.num_preemptions,
            )
        )

    def _retire(self, sequence: Sequence) -> None:
        """Finishes a sequence, wherever it is."""
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING:
            self._awaited.pop(sequence.number, None)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.finish()
        del group.sequences[sequence.choice]
        if not group.sequences:
            del self._groups[group.number]
            self._deadlines.remove(group.number)
            self._admission.dequeue(group.number)

    def _fail(self, sequence: Sequence, message: str) -> SequenceOutput:
        # What it computed, or read, may be what is wrong: nobody shall find it any more.
        for block in sequence.block_ids:
            self._pool.unpublish(block)
        self._retire(sequence)
        return sequence.end_output(FinishReason.ERROR, message=message)

    def _count_first_run(self, sequence: Sequence, num_found: int) -> None:
        group, stats = sequence.group, self._stats
        if self._admission.dequeue(group.number):
            stats.num_prompt_tokens += group.num_prompt_tokens
        sequence.num_cached_tokens = min(num_found, group.num_prompt_tokens)
        if self._prefix_cache.reads(sequence):
            stats.num_prefix_queries += sequence.num_tokens
            stats.num_prefix_hits += num_found
