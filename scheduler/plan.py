"""A step's plan while it is being made."""

import numpy as np

from scheduler.in_flight import Awaited
from scheduler.messages import Plan, PlannedRow
from scheduler.request import Sequence


class PlanDraft:
    """Collects what one step computes. Decodes come last, when nobody can lose its place to another any more."""

    __slots__ = ("_grown", "chunks", "drafts", "finishing", "lacks_blocks", "new_rows", "swapped_in")

    def __init__(self) -> None:
        self.new_rows: list[PlannedRow] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.chunks: list[tuple[Sequence, int]] = []
        # Of `chunks`, those that sample one token, and those that verify drafts.
        self.finishing: list[Sequence] = []
        self.drafts: list[Sequence] = []
        # Somebody has been preempted, or sits the step out, for want of blocks.
        self.lacks_blocks = False
        # (sequence, its number then, blocks)
        self._grown: list[tuple[Sequence, int, list[int]]] = []

    def add_row(self, sequence: Sequence) -> None:
        """Tells the workers of a sequence that has just begun to run."""
        self.new_rows.append(
            PlannedRow(
                row=sequence.row,
                sequence=sequence.number,
                token_ids=sequence.token_ids(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=list(sequence.block_ids),
                choice=sequence.choice,
                sampling=sequence.group.request.sampling,
            )
        )

    def grow(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.block_ids += blocks
        self._grown.append((sequence, sequence.number, blocks))

    def compute(self, sequence: Sequence, count: int, step: int) -> None:
        """Adds the next `count` tokens of a sequence that has a row and blocks for them, and does not decode."""
        self.chunks.append((sequence, count))
        sequence.num_computed_tokens += count
        sequence.last_step = step
        if sequence.drafts:
            self.drafts.append(sequence)
        elif sequence.num_computed_tokens == sequence.num_tokens:
            self.finishing.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes out one that is being preempted, if it is in the plan already: only one with drafts can be."""
        for index, (chunked, count) in enumerate(self.chunks):
            if chunked is sequence:
                del self.chunks[index]
                self.drafts.remove(sequence)
                sequence.num_computed_tokens -= count

    def finish(
        self,
        step: int,
        decodes: tuple[np.ndarray, np.ndarray, np.ndarray],
        decodes_version: int | None,
        trimmed: list[tuple[Sequence, int, int]],
    ) -> tuple[Plan, Awaited]:
        """The plan, but for freed rows and swaps out, and what its result is to bring.

        decodes: rows, numbers and positions, as `Decodes.advance` gives them.
        """
        rows, numbers, positions = decodes
        plan = Plan(step=step, decode_rows=rows, new_rows=self.new_rows, swapped_in=self.swapped_in)
        for sequence, number, blocks in self._grown:
            # One preempted since has no row to grow.
            if sequence.number == number:
                plan.grown_rows.append(sequence.row)
                plan.num_new_blocks.append(len(blocks))
                plan.new_blocks += blocks
        plan.trimmed_rows = [(sequence.row, kept) for sequence, number, kept in trimmed if sequence.number == number]
        if not self.chunks:
            awaited = Awaited(
                step=step,
                numbers=numbers,
                rows=rows,
                positions=positions,
                decodes_version=decodes_version,
                is_empty=not len(rows),
            )
            return plan, awaited
        plan.chunks = [(sequence.row, count) for sequence, count in self.chunks]
        plan.drafts = [(sequence.row, sequence.drafts) for sequence in self.drafts]
        sampling = {sequence.number for sequence in self.finishing + self.drafts}
        chunked = [sequence for sequence, _ in self.chunks if sequence.number in sampling]
        return plan, Awaited(
            step=step,
            numbers=np.append(numbers, np.array([sequence.number for sequence in chunked], np.int64)),
            rows=np.append(rows, np.array([sequence.row for sequence in chunked], np.uint16)),
            positions=np.append(positions, np.array([sequence.num_tokens for sequence in chunked], np.int64)),
            decodes_version=None if chunked else decodes_version,
            drafts={sequence.number: sequence.drafts for sequence in self.drafts},
            finishing=[(sequence, sequence.number) for sequence in self.finishing],
            num_prefill_tokens=sum(count for sequence, count in self.chunks if not sequence.drafts),
        )
