"""Gives decoding sequences drafts: tells the drafters what sequences got, and chooses the drafts of each step."""

import numpy as np

from scheduler.core.drafting.drafting import Drafting
from scheduler.core.drafting.outputs import OutputLengths
from scheduler.core.messages import Plan
from scheduler.core.state.decodes import Selection
from scheduler.core.state.plan_draft import PlanDraft, RowsWithDrafts
from scheduler.core.state.queue import OUTPUT_TOKEN_COST
from scheduler.core.state.request import Sequence
from scheduler.core.state.running import StepInFlight
from scheduler.core.state.state import State

# A sequence in a step in flight gets drafts only once that step has returned, and misses a step for it. It waits if
# its drafts should give it at least this many tokens more.
_LEAST_WORTH_WAITING = 1.5
# At every so many positions, the workers' drafter is asked for a draft of a row even if it gets none: how good is it?
_POSITIONS_BETWEEN_PROBES = 64
# A drafter that catches up costs a probe all tokens since the last one. So only one sequence of so many is probed.
_SEQUENCES_BETWEEN_PROBES = 16


class Speculator:
    def __init__(self, state: State, drafting: Drafting) -> None:
        self._state, self._drafting = state, drafting

    # --- Results

    def take_tokens(
        self, rows: np.ndarray, generations: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None
    ) -> None:
        """Tells the drafters the tokens that rows got in a step, which the core knows already. counts: of each row;
        None: one each."""
        unknown = self._drafting.unknown(rows, generations)
        self._drafting.extend(rows, generations, token_ids, counts)
        self._begin_all(generations[unknown])

    def _begin_all(self, generations: np.ndarray) -> None:
        """Tells the drafters sequences that they do not know, with all tokens so far."""
        for generation in generations.tolist():
            sequence = self._state.running.by_generation.get(generation)
            if sequence is not None:
                if sequence.is_decoding:
                    self._state.decodes.settle(sequence)
                self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        request = sequence.group.request
        prompt = np.frombuffer(sequence.group.prompt_token_bytes, "<i4")
        self._drafting.begin(
            sequence.row,
            sequence.generation,
            np.append(prompt, np.array(sequence.output_token_ids, np.int32)),
            max_drafts=request.max_drafts,
            scope=(request.tenant, request.cache_salt),
        )

    def note_verified(self, awaited: StepInFlight, num_accepted: int) -> None:
        """Takes how many of a step's drafts were accepted."""
        self._drafting.worth.note_verified(awaited.num_expected_drafts, num_accepted)

    def take_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Takes what the workers' drafter proposes."""
        if self._drafting.workers >= 0:
            self._drafting.take_workers(sequence.row, drafts)

    # --- Plans

    def hold_back(self) -> None:
        """Keeps decodes that are in a step in flight out of further ones, if they are better off with drafts in the
        step after its result."""
        decodes, drafting = self._state.decodes, self._drafting
        indices = (~decodes.without_steps(slice(0, len(decodes)))).nonzero()[0]
        if not len(indices):
            return
        rows, generations = decodes.rows_of(indices)
        if not drafting.propose_any(rows):
            return
        _, num_proposed, rates = drafting.best(rows, generations)
        # One token is on its way, and a step samples one more than it accepts.
        most = np.maximum(np.minimum(num_proposed, decodes.num_missing(indices) - 2), 0)
        budget = self._state.settings.max_num_batched_tokens - len(decodes)
        counts = drafting.choose(rates, most, num_rows=len(decodes), num_tokens=len(decodes), budget=budget)
        decodes.wait_all(indices[_expected(rates, counts) >= _LEAST_WORTH_WAITING])

    def choose(self, selection: Selection, draft: PlanDraft, budget: int) -> Selection:
        """Gives decodes of the selection, which all have a block for their next token, drafts after it. Returns those
        that get none.

        Everything else in the step has its tokens and blocks already: drafts take what is left. budget: the tokens that
        are left. Drafts never take the last blocks that running sequences may need in the next step, nor any while
        sequences wait.
        """
        drafting, decodes = self._drafting, self._state.decodes
        indices = np.arange(selection.stop) if isinstance(selection, slice) else selection
        num_tokens = len(indices) + draft.num_forced_tokens + draft.num_prefill_tokens
        if drafting.rest(len(indices), num_tokens):
            return selection
        # A sequence in a step in flight can't get any.
        may_get = decodes.without_steps(indices)
        if not np.count_nonzero(may_get):
            return selection
        rows, generations = decodes.rows_of(indices)
        # Sequences that came while the drafters rested.
        self._begin_all(generations[drafting.unknown(rows, generations)])
        if not drafting.propose_any(rows):
            drafting.note_step(has_drafts=False)
            return selection
        token_ids, num_proposed, rates = drafting.best(rows, generations)
        # A step also samples the token after the last accepted draft.
        most = np.minimum(num_proposed, decodes.num_missing(indices) - 1) * may_get
        counts = drafting.choose(rates, most, num_rows=len(indices), num_tokens=num_tokens, budget=budget)
        has_drafts = bool(np.count_nonzero(counts))
        drafting.note_step(has_drafts=has_drafts)
        if not has_drafts:
            return selection
        counts = self._cut_at_ends(token_ids, counts)
        self._cut_to_blocks(indices, counts, draft)
        chosen = counts > 0
        num_chosen = np.count_nonzero(chosen)
        if not num_chosen:
            return selection
        draft.num_expected_drafts = float(_expected(rates, counts).sum())
        if num_chosen == len(indices):
            self._advance(indices, counts, token_ids, draft)
            return slice(0, 0)
        self._advance(indices[chosen], counts[chosen], token_ids[chosen], draft)
        return indices[~chosen]

    def _cut_at_ends(self, token_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Drops drafts behind one that ends an output."""
        is_end = self._state.end_tokens.among(token_ids)
        if not np.count_nonzero(is_end):
            return counts
        return np.where(is_end.any(axis=1), np.minimum(counts, is_end.argmax(axis=1) + 1), counts)

    def _cut_to_blocks(self, indices: np.ndarray, counts: np.ndarray, draft: PlanDraft) -> None:
        """Cuts the counts to the blocks that are there, and takes those that are lacking."""
        state, decodes = self._state, self._state.decodes
        rooms, block_size = decodes.draft_rooms(indices), decodes.block_size
        lacking = -(-np.maximum(counts - rooms, 0) // block_size)
        if not np.count_nonzero(lacking):
            return
        num_spare = 0 if len(state.waiting) else max(0, state.pool.num_available - len(state.running))
        beyond = lacking.cumsum() > num_spare
        counts[beyond] = np.minimum(counts[beyond], np.maximum(rooms[beyond], 0))
        lacking[beyond] = 0
        growing = lacking.nonzero()[0]
        sequences = [decodes.sequences[index] for index in indices[growing].tolist()]
        decodes.grew(indices[growing], lacking[growing])
        numbers = lacking[growing].tolist()
        draft.grow_more(sequences, numbers, state.pool.take(sum(numbers)))
        for sequence, number in zip(sequences, numbers, strict=True):
            request = sequence.group.request
            if request.tenant:
                state.waiting.shares.charge(request, number * block_size * OUTPUT_TOKEN_COST)

    def _advance(self, indices: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, draft: PlanDraft) -> None:
        state = self._state
        rows, generations, positions = state.decodes.advance_drafts(indices, counts)
        chosen = token_ids[np.arange(token_ids.shape[1]) < counts[:, None]]
        draft.speculative = RowsWithDrafts(
            rows=rows, generations=generations, positions=positions, counts=counts, token_ids=chosen
        )
        state.stats.num_drafts += len(rows)
        num_tokens = len(chosen)
        state.stats.num_draft_tokens += num_tokens
        state.stats.num_speculated_tokens += num_tokens

    def ask(self, plan: Plan, awaited: StepInFlight) -> None:
        """Asks the workers' drafter for drafts of rows that sample in this plan: as many as should pay in the next."""
        drafting, rows = self._drafting, awaited.rows
        if drafting.workers < 0 or drafting.rests or not len(rows) or drafting.is_silent():
            return
        most, rows = drafting.bounds(rows, awaited.generations), rows.astype(np.int64)
        if not np.count_nonzero(most):
            return
        coming = None if drafting.lengths is None else self._coming(awaited, drafting.lengths)
        counts = drafting.choose_wanted(rows, most, awaited.positions, coming)
        # A row is probed at the first question after such a position.
        is_probe = (counts == 0) & (awaited.positions % _POSITIONS_BETWEEN_PROBES <= drafting.num_unasked)
        if coming is not None and is_probe.any():
            is_probe &= awaited.generations % _SEQUENCES_BETWEEN_PROBES == 0
            is_probe &= drafting.could_repay(rows, awaited.positions, coming)
        counts = np.minimum(np.where(is_probe, 1, counts), most)
        wanted = counts > 0
        for_any = bool(np.count_nonzero(wanted))
        drafting.note_asked(for_any=for_any)
        if for_any:
            plan.wanted_drafts = list(zip(rows[wanted].tolist(), counts[wanted].tolist(), strict=True))
            plan.num_catching_up = drafting.ask_for(rows[wanted], awaited.positions[wanted])
            # The drafts follow the tokens of this step: no other may go before them.
            decodes = self._state.decodes
            decodes.wait_all(decodes.locate(rows[wanted], awaited.generations[wanted])[1])

    def _coming(self, awaited: StepInFlight, lengths: OutputLengths) -> np.ndarray:
        """float64: the number of tokens that each row is expected to get."""
        decodes, coming = self._state.decodes, np.zeros(len(awaited.rows))
        here, indices = decodes.locate(awaited.rows, awaited.generations)
        expected = lengths.coming(decodes.output_positions(indices))
        coming[here] = np.minimum(expected, decodes.num_missing(indices))
        return coming


def _expected(rates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The number of drafts that are right, if each is with its row's probability."""
    return rates * (1.0 - rates**counts) / (1.0 - rates)
