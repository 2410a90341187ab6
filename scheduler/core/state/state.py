"""The state of the core, and the transitions of a sequence that touch several parts of it."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from scheduler.core.drafting.drafting import Drafting
from scheduler.core.messages import (
    CoreSettings,
    CoreStats,
    FinishReason,
    Moment,
    Preempted,
    PreemptionReason,
    SequenceEnd,
)
from scheduler.core.pacing.pace import Pace
from scheduler.core.state.blocks import BlockPool, HostBlocks, PrefixCache, num_blocks_for
from scheduler.core.state.decodes import Decodes
from scheduler.core.state.endings import EndTokens
from scheduler.core.state.fault_isolation import FaultIsolation
from scheduler.core.state.items import Items
from scheduler.core.state.queue import Admission, Deadlines, WaitingQueue, why_items_never_fit
from scheduler.core.state.request import Group, Sequence, SequenceStatus
from scheduler.core.state.running import InFlight, Rows, Running
from scheduler.core.state.timelines import Timelines


class State:
    """The parts of a core, shared by its planner and its results."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.admission = Admission(settings)
        self.pool = BlockPool(settings.num_blocks, keep_unused=settings.enable_prefix_caching)
        self.host_blocks = HostBlocks(settings.num_swap_blocks)
        self.prefix_cache = PrefixCache(self.pool, settings.block_size, enabled=settings.enable_prefix_caching)
        self.rows = Rows(settings.max_num_seqs)
        self.decodes = Decodes(
            settings.max_num_seqs,
            settings.block_size,
            settings.max_steps_in_flight,
            holds_constrained=settings.holds_constrained,
            max_drafts=settings.speculation.num_speculative_tokens if settings.speculation else 0,
        )
        # None: no sequence gets drafts but forced tokens.
        self.drafting = None if settings.speculation is None else Drafting(settings, settings.speculation)
        # None: steps may take any time.
        self.pace: Pace | None = None
        if settings.inter_token_latency_target:
            self.pace = Pace(settings.inter_token_latency_target, least_tokens=settings.least_prefill_tokens)
        self.running = Running(self.rows, self.pool, self.decodes)
        self.waiting = WaitingQueue(priority_first=settings.scheduling_policy == "priority")
        self.in_flight = InFlight()
        self.fault_isolation = FaultIsolation()
        self.deadlines = Deadlines()
        self.end_tokens = EndTokens()
        self.groups: dict[int, Group] = {}
        self.timelines = Timelines(settings.max_finished_timelines)
        self.stats = CoreStats()
        self.items = Items(settings, self.stats)
        # Collected until the caller takes them.
        self.ends: list[SequenceEnd] = []
        self.preemptions: list[Preempted] = []
        self.displaced: list[int] = []
        # The step of the last plan made.
        self.step = 0
        # (block, host block) copies that no plan has contained yet.
        self.swapped_out: list[tuple[int, int]] = []
        # (sequence, its generation then, number of leading blocks it keeps) that no plan has contained yet.
        self.trimmed: list[tuple[Sequence, int, int]] = []

    def sequences(self) -> Iterable[Sequence]:
        """All live sequences."""
        return (sequence for group in self.groups.values() for sequence in group.sequences.values())

    def num_swapped(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed again, as far as host blocks have them."""
        num_swapped, settings = min(sequence.num_swapped_tokens, sequence.num_tokens - 1), self.settings
        # The state in a block that is not full may be that of tokens which were not known when it was swapped out.
        return num_swapped - num_swapped % settings.block_size if settings.carries_states else num_swapped

    def has_items(self, sequence: Sequence, *, is_first: bool) -> bool:
        """True if a waiting sequence has the items that it needs. Otherwise they are asked for: as far as the window of
        `Items` goes, or beyond it if is_first."""
        if self.items.are_all_there(sequence.group):
            return True
        num_shared = len(self.prefix_cache.match(sequence)) * self.settings.block_size
        return self.items.are_ready(sequence, max(num_shared, self.num_swapped(sequence)), is_first=is_first)

    # --- Transitions

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence for lack of blocks."""
        swapped = self._put_back(sequence, PreemptionReason.NO_BLOCKS, now)
        sequence.num_tokens_when_preempted = sequence.num_tokens
        stats = self.stats
        stats.num_preemptions += 1
        stats.num_swaps += swapped
        self.preemptions.append(
            Preempted(
                key=sequence.key,
                request_id=sequence.group.request.request_id,
                swapped=swapped,
                num_preemptions=stats.num_preemptions,
            )
        )

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Preempts a running sequence so that another one can be computed alone."""
        self._put_back(sequence, PreemptionReason.SET_ASIDE, now)

    def _put_back(self, sequence: Sequence, reason: PreemptionReason, now: float) -> bool:
        """Puts a running sequence back into its old place in the queue. True if its KV was swapped to host blocks."""
        if sequence.is_decoding:
            self.decodes.settle(sequence)
        self.prefix_cache.publish(sequence)
        num_lost = min(sequence.num_computed_tokens, sequence.num_tokens)
        swapped = self.settings.preemption_mode == "swap" and self._swap_out(sequence, num_lost)
        self.running.remove(sequence, last_step=self.in_flight.last_step)
        self._wait_again(sequence)
        self._note(sequence, Moment.PREEMPTED, now, num_tokens=num_lost, reason=reason.value)
        return swapped

    def _swap_out(self, sequence: Sequence, num_tokens: int) -> bool:
        """Swaps a sequence's KV out. False if there is no room: it is then computed again."""
        num_blocks = num_blocks_for(num_tokens, self.settings.block_size)
        if not 0 < num_blocks <= self.host_blocks.num_free:
            return False
        sequence.host_blocks = self.host_blocks.take(num_blocks)
        sequence.num_swapped_tokens = num_tokens
        self.swapped_out += zip(sequence.block_ids, sequence.host_blocks, strict=False)  # look-ahead blocks stay
        self.stats.num_blocks_swapped_out += num_blocks
        return True

    def release_host_blocks(self, sequence: Sequence) -> None:
        self.host_blocks.release(sequence.host_blocks)
        sequence.host_blocks, sequence.num_swapped_tokens = [], 0

    def lose_workers(self, now: float) -> None:
        """Makes all running sequences wait again; plans in flight are void; rows, blocks and host blocks are empty."""
        self.fault_isolation.note_lost(self.running, self.in_flight)
        for sequence in self.running.forget():
            num_lost = min(sequence.num_computed_tokens, sequence.num_tokens)
            self._wait_again(sequence)
            reason = PreemptionReason.WORKERS_LOST.value
            self._note(sequence, Moment.PREEMPTED, now, num_tokens=num_lost, reason=reason)
        for sequence in self.sequences():
            self.release_host_blocks(sequence)
        self.host_blocks.reset(self.host_blocks.num_blocks)
        self.in_flight.clear()
        self.swapped_out.clear()
        self.trimmed.clear()
        self.items.reset(self.settings.encoder_cache_size)
        self.step = 0

    def blame_step(self, now: float) -> int:
        """Fails the group that was computed alone in the steps lost last. Returns how many are still to be computed
        alone."""
        assert not len(self.running), "a new epoch has begun already"
        culprit = self.fault_isolation.blame(self.groups)
        if culprit is not None:
            num_failures = self.fault_isolation.by_group[culprit].num_failures
            message = f"the workers failed in each of {num_failures} steps that computed it"
            for sequence in list(self.groups[culprit].sequences.values()):
                self.ends.append(self.fail(sequence, message, now))
        return self.fault_isolation.num_to_isolate

    def resize(self, settings: CoreSettings, now: float) -> None:
        """Takes the block counts of a new epoch. Fails sequences that can no longer fit at all."""
        assert not len(self.running), "blocks are in use"
        self.settings = self.admission.settings = settings
        self.pool.reset(settings.num_blocks)
        self.host_blocks.reset(settings.num_swap_blocks)
        self.items.reset(settings.encoder_cache_size)
        for sequence in list(self.sequences()):
            needed = num_blocks_for(sequence.max_num_tokens_with_kv, settings.block_size)
            if needed > settings.num_blocks:
                message = (
                    f"it may need {needed} KV blocks, but the workers now have {settings.num_blocks}: lower max_tokens"
                )
                self.ends.append(self.fail(sequence, message, now))
            elif message := why_items_never_fit(sequence.group.request, settings):
                self.ends.append(self.fail(sequence, message, now))

    def fail_item(self, number: int, message: str, now: float) -> list[SequenceEnd]:
        """Fails the sequences that need an item which the workers can't prepare."""
        item = self.items.asked(number)
        if item is None:
            return []
        needing = [
            sequence
            for group in self.groups.values()
            if item in group.items
            for sequence in group.sequences.values()
            if item in group.items[sequence.next_item :]
        ]
        ends = []
        for sequence in needing:
            # A group that has never run, here or elsewhere, is refused as a whole.
            request = sequence.group.request
            has_output = any(start.output_token_ids for start in request.choices)
            is_new = self.admission.is_queued(request.group) and not has_output
            ends.append(dataclasses.replace(self.fail(sequence, message, now), is_invalid=is_new))
        self.items.failed(item)
        return ends

    def _wait_again(self, sequence: Sequence) -> None:
        """Queues a sequence again. The caller has already released its row and blocks."""
        self.end_tokens.remove(sequence.end_token_ids)
        if sequence.group.items:
            self.items.put_back(sequence)
        sequence.preempt()
        self.waiting.push(sequence)

    def retire(self, sequence: Sequence, reason: FinishReason, now: float, *, cause: str = "") -> None:
        """Finishes a sequence, waiting or running. cause: a few words to add to the reason."""
        group = sequence.group
        if sequence.status is SequenceStatus.RUNNING:
            if sequence.is_decoding:
                self.decodes.settle(sequence)
            if reason is not FinishReason.ERROR:
                self.prefix_cache.publish(sequence)
                self._keep_output(sequence)
            self.end_tokens.remove(sequence.end_token_ids)
            self.running.remove(sequence, last_step=self.in_flight.last_step)
        else:
            self.waiting.remove(sequence)
        self.release_host_blocks(sequence)
        if group.items:
            self.items.leave(sequence)
        sequence.finish()
        num_output_tokens = len(sequence.output_token_ids)
        why = f"{reason.value}: {cause}" if cause else reason.value
        self._note(sequence, Moment.FINISHED, now, num_tokens=num_output_tokens, reason=why)
        if sequence.num_draft_tokens:
            self.timelines.add_drafts(group.number, sequence.num_draft_tokens, sequence.num_accepted_tokens)
        del group.sequences[sequence.choice]
        if not group.sequences:
            del self.groups[group.number]
            self.deadlines.remove(group.number)
            self.admission.dequeue(group.number)
            self.timelines.finish(group.number)
            self.fault_isolation.forget(group.number)
            if group.items:
                self.items.remove(group)

    def _keep_output(self, sequence: Sequence) -> None:
        if self.drafting is not None:
            request = sequence.group.request
            self.drafting.end_output(
                (request.tenant, request.cache_salt), np.array(sequence.output_token_ids, np.int32)
            )

    def fail(self, sequence: Sequence, message: str, now: float, *, no_token: bool = False) -> SequenceEnd:
        # The KV that it computed or read may be what is wrong: no other sequence may find it.
        for block in sequence.block_ids:
            self.pool.unpublish(block)
        self.retire(sequence, FinishReason.ERROR, now, cause=message)
        return sequence.end(FinishReason.ERROR, message=message, no_token=no_token)

    def _note(self, sequence: Sequence, moment: Moment, now: float, *, num_tokens: int, reason: str) -> None:
        self.timelines.add(
            sequence.group.number, moment, now, choice=sequence.choice, num_tokens=num_tokens, reason=reason
        )

    # --- Integrity

    def check_integrity(self) -> None:
        """Asserts that all counts kept in two places agree. Slow: for tests, and when idle."""
        self.running.check_integrity()
        live, block_size = list(self.sequences()), self.settings.block_size
        assert len(live) == len(self.running) + len(self.waiting)
        self.waiting.check_integrity()
        for sequence in live:
            is_running = sequence.status is SequenceStatus.RUNNING
            assert (
                is_running
                == (self.running.by_generation.get(sequence.generation) is sequence)
                == bool(sequence.block_ids)
            )
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * block_size
            assert not (is_running and sequence.host_blocks), "a sequence that runs holds host blocks"
            assert num_blocks_for(sequence.num_swapped_tokens, block_size) == len(sequence.host_blocks)
            if not sequence.is_decoding and not sequence.drafts:
                assert sequence.num_computed_tokens <= sequence.num_tokens
        self.host_blocks.check_integrity([block for sequence in live for block in sequence.host_blocks])
        self.end_tokens.check_integrity(sequence.end_token_ids for sequence in self.running.by_generation.values())
        assert all(group.sequences for group in self.groups.values()), "a group has no sequence left"
        self.timelines.check_integrity(self.groups)
        self.fault_isolation.check_integrity(self.groups)
        self.items.check_integrity(self.groups.values())
        assert self.in_flight or not any(sequence.last_step > self.step for sequence in live)
