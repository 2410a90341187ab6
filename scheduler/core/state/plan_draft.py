"""The plan being made: what one step computes."""

from dataclasses import dataclass

import numpy as np

from scheduler.core.messages import NO_INTS, NO_ROWS, Plan, PlannedRow
from scheduler.core.state.request import Sequence
from scheduler.core.state.running import StepInFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWithDrafts:
    """The sequences that verify drafts in one plan, as columns."""

    # uint16.
    rows: np.ndarray
    generations: np.ndarray
    # The first sampled token's, counted from the beginning of the prompt.
    positions: np.ndarray
    # int64: the number of drafts, at least 1 each. int32 [sum of the counts]: the drafts.
    counts: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def of_forced(cls, sequences: list[Sequence]) -> "RowsWithDrafts":
        """The sequences with their forced tokens."""
        return cls(
            rows=np.array([sequence.row for sequence in sequences], np.uint16),
            generations=np.array([sequence.generation for sequence in sequences], np.int64),
            positions=np.array([sequence.num_tokens for sequence in sequences], np.int64),
            counts=np.array([len(sequence.drafts) for sequence in sequences], np.int64),
            token_ids=np.array([token_id for sequence in sequences for token_id in sequence.drafts], np.int32),
        )

    def and_then(self, others: "RowsWithDrafts") -> "RowsWithDrafts":
        return RowsWithDrafts(
            rows=np.append(self.rows, others.rows),
            generations=np.append(self.generations, others.generations),
            positions=np.append(self.positions, others.positions),
            counts=np.append(self.counts, others.counts),
            token_ids=np.append(self.token_ids, others.token_ids),
        )


class PlanDraft:
    """Collects what one step computes. Decodes are added last, once none of them can lose its place any more."""

    __slots__ = (
        "_grown",
        "chunks",
        "finishing",
        "forced",
        "lacks_blocks",
        "new_rows",
        "num_expected_drafts",
        "speculative",
        "swapped_in",
    )

    def __init__(self) -> None:
        self.new_rows: list[PlannedRow] = []
        self.swapped_in: list[tuple[int, int]] = []
        # (sequence, tokens of its prefill)
        self.chunks: list[tuple[Sequence, int]] = []
        # Those that complete it.
        self.finishing: list[Sequence] = []
        # The sequences that verify forced tokens.
        self.forced: list[Sequence] = []
        # The decodes with drafts, and how many of these should be accepted.
        self.speculative: RowsWithDrafts | None = None
        self.num_expected_drafts = 0.0
        # A sequence has been preempted, or sits the step out, for lack of blocks.
        self.lacks_blocks = False
        # (sequence, its generation then, blocks)
        self._grown: list[tuple[Sequence, int, list[int]]] = []

    def add_row(self, sequence: Sequence) -> None:
        """Adds the row of a sequence that has just begun to run."""
        self.new_rows.append(
            PlannedRow(
                row=sequence.row,
                sequence=sequence.generation,
                token_ids=sequence.token_ids(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=list(sequence.block_ids),
                choice=sequence.choice,
                sampling=sequence.group.request.sampling,
                items=[
                    (item.number, span)
                    for item, span in zip(sequence.group.items, sequence.group.request.items, strict=True)
                ],
            )
        )

    def grow(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.block_ids += blocks
        self._grown.append((sequence, sequence.generation, blocks))

    def grow_more(self, sequences: list[Sequence], numbers: list[int], blocks: list[int]) -> None:
        """`grow` for sequences that may have got blocks in this plan already: each gets the next numbers[i] blocks."""
        grown, start = self._grown, 0
        places = {generation: index for index, (_, generation, _) in enumerate(grown)}
        for sequence, number in zip(sequences, numbers, strict=True):
            own, start = blocks[start : start + number], start + number
            sequence.block_ids += own
            generation = sequence.generation
            index = places.get(generation)
            if index is None:
                grown.append((sequence, generation, own))
            else:
                grown[index] = sequence, generation, grown[index][2] + own

    @property
    def num_forced_tokens(self) -> int:
        """Tokens that the sequences with forced tokens compute."""
        return sum(1 + len(sequence.drafts) for sequence in self.forced)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    def prefill(self, sequence: Sequence, count: int, step: int) -> None:
        """Adds the next `count` tokens of a prefilling sequence, which has blocks for them."""
        self.chunks.append((sequence, count))
        sequence.num_computed_tokens += count
        sequence.last_step = step
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.finishing.append(sequence)

    def force(self, sequence: Sequence, step: int) -> None:
        """Adds the last token of a sequence and its forced ones, for which it has blocks."""
        self.forced.append(sequence)
        sequence.num_computed_tokens += 1 + len(sequence.drafts)
        sequence.last_step = step

    def withdraw(self, sequence: Sequence) -> None:
        """Removes a sequence that is being preempted, if it is in the plan already: only one with forced tokens can
        be."""
        if any(forced is sequence for forced in self.forced):
            self.forced.remove(sequence)
            sequence.num_computed_tokens -= 1 + len(sequence.drafts)

    def finish(
        self,
        step: int,
        decodes: tuple[np.ndarray, np.ndarray, np.ndarray],
        decodes_version: int | None,
        trimmed: list[tuple[Sequence, int, int]],
    ) -> tuple[Plan, StepInFlight]:
        """Returns the plan, still without freed rows and swaps out, and the result that it awaits.

        decodes: rows, generations and positions, as `Decodes.advance` returns them.
        """
        rows, generations, positions = decodes
        # A decode reads as many tokens as the position of the token that it samples.
        num_context_tokens = int(positions.sum())
        chunks = self.chunks
        if chunks:
            num_context_tokens += sum(sequence.num_computed_tokens for sequence, _ in chunks)
        verified = self._with_drafts() if self.forced else self.speculative
        if verified is not None:
            num_context_tokens += int(verified.positions.sum()) + len(verified.token_ids)
        plan = Plan(
            step=step,
            decode_rows=rows,
            rows_with_drafts=NO_ROWS if verified is None else verified.rows,
            num_drafts=NO_INTS if verified is None else verified.counts.astype(np.int32),
            draft_token_ids=NO_INTS if verified is None else verified.token_ids,
            new_rows=self.new_rows,
            swapped_in=self.swapped_in,
            chunks=[(sequence.row, count) for sequence, count in chunks] if chunks else [],
            num_context_tokens=num_context_tokens,
        )
        for sequence, generation, blocks in self._grown:
            # A sequence preempted since has no row to grow.
            if sequence.generation == generation:
                plan.grown_rows.append(sequence.row)
                plan.num_new_blocks.append(len(blocks))
                plan.new_blocks += blocks
        for sequence, generation, kept in trimmed:
            if sequence.generation == generation:
                plan.trimmed_rows.append((sequence.row, kept))
        if not chunks and verified is None:
            awaited = StepInFlight(
                step=step,
                generations=generations,
                rows=rows,
                positions=positions,
                decodes_version=decodes_version,
                is_empty=not len(rows),
            )
            return plan, awaited
        num_drafts = None
        if verified is not None:
            num_drafts = np.append(np.zeros(len(rows), np.int64), verified.counts)
            generations = np.append(generations, verified.generations)
            rows, positions = np.append(rows, verified.rows), np.append(positions, verified.positions)
        finishing = self.finishing
        if finishing:
            generations = np.append(generations, np.array([sequence.generation for sequence in finishing], np.int64))
            rows = np.append(rows, np.array([sequence.row for sequence in finishing], np.uint16))
            positions = np.append(positions, np.array([sequence.num_tokens for sequence in finishing], np.int64))
            if num_drafts is not None:
                num_drafts = np.append(num_drafts, np.zeros(len(finishing), np.int64))
        return plan, StepInFlight(
            step=step,
            generations=generations,
            rows=rows,
            positions=positions,
            decodes_version=None if finishing or verified is not None else decodes_version,
            num_drafts=num_drafts,
            num_expected_drafts=self.num_expected_drafts,
            has_forced=bool(self.forced),
            finishing=[(sequence, sequence.generation) for sequence in finishing],
            num_prefill_tokens=self.num_prefill_tokens,
        )

    def _with_drafts(self) -> RowsWithDrafts:
        forced = RowsWithDrafts.of_forced(self.forced)
        return forced if self.speculative is None else forced.and_then(self.speculative)
