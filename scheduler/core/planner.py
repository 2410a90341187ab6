"""Plans the next step: running sequences first, then waiting ones, within the token budget, rows and blocks."""

import numpy as np

from scheduler.core.messages import Moment, Plan
from scheduler.core.pacer import Pacer
from scheduler.core.pacing.pace import StepLimit
from scheduler.core.policies import PREEMPTION_POLICIES, Chunking
from scheduler.core.speculation import Speculator
from scheduler.core.state.blocks import num_blocks_for
from scheduler.core.state.decodes import Selection, size_of
from scheduler.core.state.plan_draft import PlanDraft
from scheduler.core.state.queue import OUTPUT_TOKEN_COST
from scheduler.core.state.request import Sequence, SequenceStatus
from scheduler.core.state.state import State

_NONE = slice(0, 0)
# Waiting sequences that others overtake in one plan because their items are being prepared.
_MOST_UNREADY = 32


class Planner:
    def __init__(self, state: State, speculator: Speculator | None = None, pacer: Pacer | None = None) -> None:
        """speculator: None if no sequence gets drafts but forced tokens. pacer: None if steps may take any time."""
        self._state, self._speculator, self._pacer = state, speculator, pacer
        self._preemption = PREEMPTION_POLICIES[state.settings.preemption_policy]

    def plan(self, now: float) -> Plan | None:
        """None if nothing can run or enough steps are in flight; the next plan then reports rows freed meanwhile."""
        state, settings = self._state, self._state.settings
        if len(state.in_flight) >= settings.max_steps_in_flight:
            return None
        if state.fault_isolation.is_isolating and not self._isolate(now):
            return None
        draft, budget = PlanDraft(), settings.max_num_batched_tokens
        if state.items.is_used:
            state.items.begin_plan()
        selection, version, limit = _NONE, state.decodes.version, None
        if self._speculator is not None and len(state.in_flight) and settings.num_stages == 1:
            self._speculator.hold_back()
        if not settings.enable_chunked_prefill:
            # Prefills go first, and never together with decodes.
            self._prefill(draft, budget, now)
        if not draft.chunks:
            num_drafting = self._choose_drafts(budget) if state.running.drafting else 0
            selection = self._make_room_for_decodes(draft, budget - num_drafting, now)
            version = state.decodes.version
            budget -= size_of(selection) + num_drafting
            self._verify_drafts(draft, now)
            if settings.enable_chunked_prefill and (state.running.prefilling or len(state.waiting)):
                limit = self._pacer and self._pacer.limit(draft, selection)
                self._prefill(draft, budget, now, limit)
        if state.decodes.version != version:
            # A prefill has preempted a selected sequence.
            selection = self._those_with_room(size_of(selection))
        if self._speculator is not None and size_of(selection):
            num_left = settings.max_num_batched_tokens - size_of(selection)
            num_left -= draft.num_forced_tokens + draft.num_prefill_tokens
            if limit is not None and limit.is_used:
                num_left = min(num_left, limit.num_drafts)
            selection = self._speculator.choose(selection, draft, num_left)
        if not (draft.chunks or draft.forced or size_of(selection) or draft.speculative is not None):
            return None
        plan = self._finish(draft, selection)
        if self._pacer is not None:
            self._pacer.note_plan(plan, draft, limit, now)
        return plan

    def plan_empty(self) -> Plan | None:
        """Plans a step that computes nothing, after `plan` returned None. None if enough steps are in flight."""
        if len(self._state.in_flight) >= self._state.settings.max_steps_in_flight:
            return None
        self._state.stats.num_empty_steps += 1
        return self._finish(PlanDraft(), _NONE)

    def _isolate(self, now: float) -> bool:
        """Lets only one suspect run. False if the steps of the previous one must return first."""
        state = self._state
        others = state.fault_isolation.gate(state.groups, state.running, state.in_flight)
        for sequence in others or ():
            state.set_aside(sequence, now)
        return others is not None

    # --- Decodes

    def _make_room_for_decodes(self, draft: PlanDraft, budget: int, now: float) -> Selection:
        """Selects the sequences that decode in this step. Gets each a block for it, preempting the last in order."""
        state = self._state
        decodes, pool = state.decodes, state.pool
        limit, selection = self._most_decodes(budget), _NONE
        while len(decodes):
            selection = self._select(limit)
            missing = decodes.without_room(selection)
            if not len(missing):
                return selection
            # A slice begins at 0, so positions within it are indices.
            indices = missing if isinstance(selection, slice) else selection[missing]
            found = decodes.at(indices)
            if len(found) > pool.num_available:
                if not self._grow_one_by_one(found, draft, now):
                    # A sequence that waits for others to make progress sits this step out.
                    return self._those_with_room(limit)
                continue
            blocks = pool.take(len(found))
            state.prefix_cache.publish(*found)
            for sequence, block in zip(found, blocks, strict=True):
                draft.grow(sequence, [block])
                self._charge(sequence, 1)
            decodes.grew(indices)
            return selection
        return _NONE

    def _grow_one_by_one(self, sequences: list[Sequence], draft: PlanDraft, now: float) -> bool:
        """Gives each a block in order, preempting others if need be. False if one has to sit this step out."""
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._grow(sequence, sequence.num_computed_tokens + 1, draft, now):
                self._state.decodes.grew_one(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                return False
        return True

    def _most_decodes(self, budget: int) -> int:
        """The maximum number of decodes in this step. With pipeline stages, each step in flight gets an equal share,
        so that all stages have work."""
        settings = self._state.settings
        if settings.num_stages == 1:
            return budget
        return min(budget, -(-len(self._state.decodes) // settings.max_steps_in_flight))

    def _select(self, limit: int) -> Selection:
        state = self._state
        return state.decodes.select(
            limit, steps_in_flight=len(state.in_flight) > 0, one_step_each=self._holds_one_step_each
        )

    def _those_with_room(self, limit: int) -> Selection:
        """Selects the decodes that already have a block for their next token."""
        selection = self._select(limit)
        missing = self._state.decodes.without_room(selection)
        indices = np.arange(selection.stop) if isinstance(selection, slice) else selection
        return np.delete(indices, missing)

    @property
    def _holds_one_step_each(self) -> bool:
        """True if any sequence is in at most one step in flight: the host must know its result to plan the next."""
        return self._state.settings.num_stages > 1

    # --- Forced tokens and prefills

    def _choose_drafts(self, budget: int) -> int:
        """Cuts forced tokens to the tokens and blocks that remain once every sequence has one token and a block for it.

        So they take neither from other sequences. A sequence left without them decodes as usual. Returns the number
        of tokens that the sequences with forced tokens compute.
        """
        state, pool, block_size = self._state, self._state.pool, self._state.settings.block_size
        drafting = [sequence for sequence in state.running.drafting if not self._is_held(sequence)]
        decodes = self._select(len(state.decodes))
        num_tokens_left = budget - size_of(decodes) - len(drafting)
        num_blocks_left = pool.num_available - len(state.decodes.without_room(decodes))
        num_blocks_left -= sum(_num_lacking(sequence, 1, block_size) for sequence in drafting)
        num_drafting = 0
        for sequence in drafting:
            num_lacking = _num_lacking(sequence, 1, block_size)
            capacity = (len(sequence.block_ids) + num_lacking + num_blocks_left) * block_size
            count = min(len(sequence.drafts), num_tokens_left, capacity - sequence.num_computed_tokens - 1)
            if count < 1 or num_blocks_left < 0:
                state.running.decode(sequence, num_planned=sequence.num_tokens)
                continue
            state.running.draft(sequence, sequence.drafts[:count])
            num_tokens_left -= count
            num_blocks_left -= _num_lacking(sequence, 1 + count, block_size) - num_lacking
            num_drafting += 1 + count
        return num_drafting

    def _verify_drafts(self, draft: PlanDraft, now: float) -> None:
        """Adds one token and the forced ones after it for each sequence that has any."""
        state = self._state
        for sequence in list(state.running.drafting):
            if self._is_held(sequence):
                continue
            count = len(sequence.drafts)
            fits = self._grow(sequence, sequence.num_computed_tokens + 1 + count, draft, now)
            assert fits, "the drafts were cut to what fits"
            draft.force(sequence, state.step + 1)
            state.stats.num_draft_tokens += count

    def _prefill(self, draft: PlanDraft, budget: int, now: float, limit: StepLimit | None = None) -> None:
        state = self._state
        if limit is not None and state.items.is_used:
            state.items.limit(limit.num_embeddings)
        # The next chunk depends on no result: only a pipeline holds it back while the previous one is in flight.
        is_pipeline = state.settings.num_stages > 1
        candidates = [
            sequence for sequence in state.running.prefilling if not (is_pipeline and self._is_held(sequence))
        ]
        chunking = Chunking(state.settings, budget, len(candidates) + len(state.waiting), limit)
        for sequence in candidates:
            if not chunking.budget:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            missing = sequence.num_tokens - sequence.num_computed_tokens
            count = chunking.bound(missing, sequence.num_tokens)
            if count and sequence.group.items:
                count = self._cut_at_items(sequence, sequence.num_computed_tokens, count, chunking)
            # A prefill that waits for blocks does not stop those behind it: it may be waiting for them.
            if not count or not self._grow(sequence, sequence.num_computed_tokens + count, draft, now):
                continue
            self._compute_prefill(sequence, count, draft, chunking, now)
        # Sequences that were preempted or wait for blocks need the room more than new ones.
        if not draft.lacks_blocks:
            self._admit_waiting(draft, chunking, now)

    def _is_held(self, sequence: Sequence) -> bool:
        """True if a step in flight computes a sequence, which does not decode."""
        return sequence.last_step >= self._state.in_flight.first_step > 0

    def _compute_prefill(
        self, sequence: Sequence, count: int, draft: PlanDraft, chunking: Chunking, now: float
    ) -> None:
        state, num_tokens = self._state, sequence.num_tokens
        missing = num_tokens - sequence.num_computed_tokens
        chunking.spend(count, missing, num_tokens)
        if sequence.group.items:
            state.items.take(sequence, sequence.num_computed_tokens + count, chunking.limit)
        draft.prefill(sequence, count, state.step + 1)
        state.prefix_cache.publish(sequence)
        moment = Moment.SCHEDULED if count == missing else Moment.CHUNKED
        self._note(sequence, moment, now, count)

    def _admit_waiting(self, draft: PlanDraft, chunking: Chunking, now: float) -> None:
        """Admits waiting sequences strictly in order: none overtakes one that needs more room.

        The exceptions: others overtake a sequence whose items are being prepared, and, if the settings allow it, a
        prefill that only its length keeps out.
        """
        state, passed, num_unready = self._state, [], 0
        if state.fault_isolation.is_isolating:
            self._admit_suspect(draft, chunking, now)
            return
        while chunking.budget and state.rows.num_free and (sequence := state.waiting.peek()) is not None:
            if sequence.group.items and not state.has_items(sequence, is_first=not num_unready):
                num_unready += 1
                if num_unready > _MOST_UNREADY:
                    break
                state.waiting.remove(sequence)
                passed.append(sequence)
            elif chunking.passes(sequence.num_tokens) and len(passed) < state.settings.max_num_seqs:
                state.waiting.remove(sequence)
                passed.append(sequence)
            elif not self._admit(sequence, draft, chunking, now):
                break
        for sequence in passed:
            state.waiting.push(sequence)

    def _admit_suspect(self, draft: PlanDraft, chunking: Chunking, now: float) -> None:
        """Admits the one group that is computed alone."""
        state = self._state
        assert state.fault_isolation.alone is not None
        sequences = state.groups[state.fault_isolation.alone].sequences.values()
        for sequence in sorted(sequences, key=lambda sequence: sequence.order):
            if sequence.status is SequenceStatus.RUNNING:
                continue
            if sequence.group.items and not state.has_items(sequence, is_first=True):
                break
            if not chunking.budget or not state.rows.num_free or not self._admit(sequence, draft, chunking, now):
                break

    def _admit(self, sequence: Sequence, draft: PlanDraft, chunking: Chunking, now: float) -> bool:
        """Admits a waiting sequence; False if it has to wait on."""
        state, block_size = self._state, self._state.settings.block_size
        if sequence.group.is_computing_prompt:
            # Another choice is computing the prompt; this one will find its blocks.
            return False
        shared = state.prefix_cache.match(sequence)
        num_tokens, num_shared = sequence.num_tokens, len(shared) * block_size
        # At least one token must be computed: the next one is sampled from its logits.
        num_found = max(num_shared, state.num_swapped(sequence))
        count = chunking.bound(num_tokens - num_found, num_tokens)
        if count and sequence.group.items:
            count = self._cut_at_items(sequence, num_found, count, chunking)
        if not count:
            return False
        is_new = sequence.status is SequenceStatus.WAITING
        num_with_blocks = num_found + count
        if not is_new:
            num_with_blocks = self._preemption.num_tokens_on_return(num_tokens, num_with_blocks)
        num_missing = num_blocks_for(num_with_blocks, block_size) - len(shared)
        if not state.pool.fits(shared, num_missing + self._preemption.headroom(state.running)):
            return False
        state.waiting.remove(sequence)
        if is_new:
            self._count_first_run(sequence, num_found)
            self._charge(sequence, num_missing)
        state.pool.hold(shared)
        blocks = shared + state.pool.take(num_missing)
        swapped = list(zip(sequence.host_blocks, blocks, strict=False))[len(shared) :]
        draft.swapped_in += swapped
        state.stats.num_blocks_swapped_in += len(swapped)
        state.release_host_blocks(sequence)
        state.running.start(sequence, blocks, num_found)
        state.end_tokens.add(sequence.end_token_ids)
        sequence.num_published_blocks = len(shared)
        if sequence.group.items:
            state.items.skip(sequence, num_found)
        draft.add_row(sequence)
        self._note(sequence, Moment.ADMITTED if is_new else Moment.RESUMED, now, num_found)
        self._compute_prefill(sequence, count, draft, chunking, now)
        return True

    def _cut_at_items(self, sequence: Sequence, start: int, count: int, chunking: Chunking) -> int:
        """Cuts a chunk before the first item whose embeddings are not there and can't be, in this step."""
        kept = self._state.items.count(sequence, start, count, chunking.limit)
        is_cut_only_here = kept < count == sequence.num_tokens - start
        return 0 if is_cut_only_here and not chunking.may_leave_unfinished(sequence.num_tokens) else kept

    def _count_first_run(self, sequence: Sequence, num_found: int) -> None:
        group, stats = sequence.group, self._state.stats
        if self._state.admission.dequeue(group.number):
            stats.num_prompt_tokens += group.num_prompt_tokens
        sequence.num_cached_tokens = min(num_found, group.num_prompt_tokens)
        if self._state.prefix_cache.reads(sequence):
            stats.num_prefix_queries += sequence.num_tokens
            stats.num_prefix_hits += num_found

    # --- Shared by decodes and prefills

    def _grow(self, sequence: Sequence, num_tokens: int, draft: PlanDraft, now: float) -> bool:
        """Gives a running sequence blocks for num_tokens tokens, preempting the last in order if need be.

        False if that preempted the sequence itself, or if it has to wait for others to make progress. The first in
        order always gets its blocks in the end: alone, it fits.
        """
        state = self._state
        missing = num_blocks_for(num_tokens, state.settings.block_size) - len(sequence.block_ids)
        while state.pool.num_available < missing:
            draft.lacks_blocks = True
            victim = self._preemption.victim(sequence, state.running)
            if victim is None:
                return False
            draft.withdraw(victim)
            state.preempt(victim, now)
            if victim is sequence:
                return False
        if sequence.is_decoding:
            state.prefix_cache.publish(sequence)
        if missing > 0:
            draft.grow(sequence, state.pool.take(missing))
            self._charge(sequence, missing)
        return True

    def _charge(self, sequence: Sequence, num_blocks: int) -> None:
        """Charges its tenant for the tokens of blocks that a sequence has taken to compute them.

        A sequence that comes back takes blocks for its whole context: they have been charged before.
        """
        request = sequence.group.request
        if not request.tenant:
            return
        cost = num_blocks * self._state.settings.block_size
        if sequence.is_decoding or sequence.drafts:
            cost *= OUTPUT_TOKEN_COST
        self._state.waiting.shares.charge(request, cost)

    def _note(self, sequence: Sequence, moment: Moment, now: float, num_tokens: int) -> None:
        state = self._state
        state.timelines.add(
            sequence.group.number, moment, now, choice=sequence.choice, step=state.step + 1, num_tokens=num_tokens
        )

    def _finish(self, draft: PlanDraft, selection: Selection) -> Plan:
        state = self._state
        decodes = state.decodes
        state.step += 1
        advanced = decodes.advance(selection)
        version = decodes.version if isinstance(selection, slice) else None
        plan, awaited = draft.finish(state.step, advanced, version, state.trimmed)
        state.trimmed = []
        plan.freed_rows = state.rows.take_freed()
        plan.swapped_out, state.swapped_out = state.swapped_out, []
        for sequence in draft.finishing:
            state.running.decode(sequence, num_planned=sequence.num_tokens + 1)
        state.in_flight.add(awaited)
        if state.items.is_used:
            state.items.finish_plan(plan)
        state.stats.num_steps += 1
        if self._speculator is not None:
            self._speculator.ask(plan, awaited)
        return plan


def _num_lacking(sequence: Sequence, count: int, block_size: int) -> int:
    """The number of blocks that a sequence still lacks for its next `count` tokens."""
    return max(0, num_blocks_for(sequence.num_computed_tokens + count, block_size) - len(sequence.block_ids))
