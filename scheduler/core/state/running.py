"""The running sequences: their rows and blocks, the plan being made for them, and the plans in flight.

A running sequence is in one of three lists: `decodes` (it decodes, one token in a step or several with drafts),
`drafting` (it has forced tokens to verify as drafts) or `prefilling` (it lacks more than one token).
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter

import numpy as np

from scheduler.core.messages import Plan, PlannedRow
from scheduler.core.pacing.pace import StepTiming
from scheduler.core.state.blocks import BlockPool
from scheduler.core.state.decodes import Decodes
from scheduler.core.state.request import Sequence
from scheduler.core.state.rows import Rows

_order = attrgetter("order")


class Running:
    """Keeps rows, blocks, generations and lists consistent with the sequences that run. Only `start` changes a
    sequence's status."""

    def __init__(self, rows: Rows, pool: BlockPool, decodes: Decodes) -> None:
        self._rows = rows
        self._pool = pool
        # Generations given out so far, counted from 1. A sequence gets a new one each time it takes a row.
        self.num_generations = 0
        self.decodes = decodes
        # Sorted by order; read only for callers.
        self.drafting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.by_generation: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.by_generation)

    @property
    def num_growing(self) -> int:
        """The number of sequences that may need more blocks than they have."""
        block_size = self.decodes.block_size
        others = self.drafting + self.prefilling
        num_others = sum(s.max_num_tokens_with_kv > len(s.block_ids) * block_size for s in others)
        return self.decodes.num_growing + num_others

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens of prefilling sequences that no plan computes yet."""
        return sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in self.prefilling)

    def num_known(self, sequence: Sequence) -> int:
        """The up-to-date num_tokens of a running sequence, decoding or not."""
        return self.decodes.num_known(sequence) if sequence.is_decoding else sequence.num_tokens

    def from_last(self) -> Iterator[Sequence]:
        """All running sequences, last in order first."""
        lists = (self.decodes.sequences, self.drafting, self.prefilling)
        return merge(*map(reversed, lists), key=_order, reverse=True)

    def start(self, sequence: Sequence, block_ids: list[int], num_computed_tokens: int) -> None:
        """Gives a sequence a row and starts its prefill. The caller already holds its blocks, which contain the KV of
        num_computed_tokens tokens."""
        self.num_generations += 1
        generation, row = self.num_generations, self._rows.take()
        sequence.start(row=row, generation=generation, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
        self.by_generation[generation] = sequence
        insort(self.prefilling, sequence, key=_order)

    def restore(self, sequence: Sequence, *, is_decoding: bool) -> None:
        """Restores a sequence of a saved core, which already has its row, blocks and generation."""
        self.by_generation[sequence.generation] = sequence
        if is_decoding:
            self.decodes.add(sequence, num_planned=sequence.num_computed_tokens + 1)
        else:
            insort(self.drafting if sequence.drafts else self.prefilling, sequence, key=_order)

    def decode(self, sequence: Sequence, *, num_planned: int) -> None:
        """Moves a sequence to the decodes: it computes one token in every step. num_planned: see `Decodes.add`."""
        _remove(self.drafting if sequence.drafts else self.prefilling, sequence)
        sequence.drafts = ()
        self.decodes.add(sequence, num_planned=num_planned)

    def draft(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Sets the forced tokens that a sequence tries next. It must not be in any step in flight."""
        if sequence.is_decoding:
            self.decodes.remove(sequence)
            insort(self.drafting, sequence, key=_order)
        sequence.drafts = drafts

    def remove(self, sequence: Sequence, *, last_step: int) -> None:
        """Removes a sequence and releases its row and blocks. last_step: the last step in flight; 0: none is."""
        if sequence.is_decoding:
            self.decodes.remove(sequence)
        else:
            _remove(self.drafting if sequence.drafts else self.prefilling, sequence)
        del self.by_generation[sequence.generation]
        self._pool.release(sequence.block_ids)
        self._rows.release(sequence.row, last_step=last_step)

    def forget(self) -> list[Sequence]:
        """Removes all sequences and resets rows and blocks, which the workers have lost. Returns the sequences in
        order."""
        sequences = sorted(self.by_generation.values(), key=_order)
        self.decodes.clear()
        self.drafting, self.prefilling = [], []
        self.by_generation.clear()
        self._rows.reset()
        self._pool.reset(self._pool.num_blocks)
        return sequences

    def check_integrity(self) -> None:
        """Asserts that lists, generations, rows and blocks agree."""
        self.decodes.check_integrity()
        sequences = list(self.from_last())
        assert self.by_generation == {sequence.generation: sequence for sequence in sequences}
        assert all(sequence.drafts for sequence in self.drafting)
        assert not any(sequence.drafts or sequence.is_decoding for sequence in self.prefilling)
        self._rows.check_integrity([sequence.row for sequence in sequences])
        self._pool.check_integrity(Counter(block for sequence in sequences for block in sequence.block_ids))


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(sequences, sequence.order, key=_order)
    assert sequences[index] is sequence
    del sequences[index]


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """The sequences that sample in one plan, in batch order, as columns: the decodes, then some of the chunks."""

    step: int
    # positions: of the first sampled token, counted from the beginning of the prompt.
    generations: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    # `Decodes.version` at the time of the plan, if the columns are the first decodes in order; otherwise None.
    decodes_version: int | None
    # Number of drafts of each; None: none has any.
    num_drafts: np.ndarray | None = None
    # How many of the drafts should be accepted, without forced tokens.
    num_expected_drafts: float = 0.0
    # True if there are forced tokens among the drafts.
    has_forced: bool = False
    # Sequences whose prefill this step completes, with their generations at the time of the plan.
    finishing: list[tuple[Sequence, int]] = field(default_factory=list)
    # Prefill tokens that the step computes.
    num_prefill_tokens: int = 0
    # True if the step computes nothing.
    is_empty: bool = False
    # None unless inter_token_latency_target is set.
    timing: StepTiming | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeRows:
    """The decodes that verify drafts in one plan, as columns."""

    rows: np.ndarray
    generations: np.ndarray
    # The first sampled token's, counted from the beginning of the prompt.
    positions: np.ndarray
    # int64: the number of drafts, at least 1 each. int32 [rows, at least the largest count]: the drafts.
    counts: np.ndarray
    token_ids: np.ndarray

    def add_to(self, plan: Plan) -> None:
        """Adds the chunks and drafts of these rows, behind the others."""
        counts = self.counts.tolist()
        plan.chunks += zip(self.rows.tolist(), (self.counts + 1).tolist(), strict=True)
        plan.num_drafts += counts
        are_drafts = np.arange(self.token_ids.shape[1]) < self.counts[:, None]
        plan.draft_token_ids += self.token_ids[are_drafts].tolist()


class InFlight:
    """The steps in flight, in the order of their plans, which is also that of their results."""

    def __init__(self) -> None:
        self._awaited: deque[StepInFlight] = deque()

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._awaited)

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def last_step(self) -> int:
        """The step planned last; 0 if none is in flight."""
        return self._awaited[-1].step if self._awaited else 0

    @property
    def first_step(self) -> int:
        """The step of the next result; 0 if none is in flight."""
        return self._awaited[0].step if self._awaited else 0

    @property
    def is_computing(self) -> bool:
        """True if a step in flight is not empty."""
        return any(not awaited.is_empty for awaited in self._awaited)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(awaited.num_prefill_tokens for awaited in self._awaited)

    def add(self, awaited: StepInFlight) -> None:
        self._awaited.append(awaited)

    def take(self, step: int) -> StepInFlight | None:
        """Removes the step whose result has come; None if it is not the next one."""
        return self._awaited.popleft() if self._awaited and self._awaited[0].step == step else None

    def note_timing(self, timing: StepTiming) -> None:
        """Sets the timing of the step planned last."""
        self._awaited[-1].timing = timing

    def clear(self) -> None:
        self._awaited.clear()

    @property
    def generations(self) -> set[int]:
        """The row generations that sample in a step in flight."""
        return {generation for awaited in self._awaited for generation in awaited.generations.tolist()}


class PlanDraft:
    """Collects what one step computes. Decodes are added last, once none of them can lose its place any more."""

    __slots__ = (
        "_grown", "chunks", "drafts", "finishing", "lacks_blocks", "new_rows", "num_expected_drafts", "speculative",
        "swapped_in",
    )  # fmt: skip

    def __init__(self) -> None:
        self.new_rows: list[PlannedRow] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.chunks: list[tuple[Sequence, int]] = []
        # The sequences in `chunks` that complete their prefill, and those that verify forced tokens.
        self.finishing: list[Sequence] = []
        self.drafts: list[Sequence] = []
        # The decodes with drafts, and how many of these should be accepted.
        self.speculative: SpeculativeRows | None = None
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
        """Removes a sequence that is being preempted, if it is in the plan already: only one with drafts can be."""
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
    ) -> tuple[Plan, StepInFlight]:
        """Returns the plan, still without freed rows and swaps out, and the result that it awaits.

        decodes: rows, generations and positions, as `Decodes.advance` returns them.
        """
        rows, generations, positions = decodes
        # A decode reads as many tokens as the position of the token that it samples.
        num_context_tokens = int(positions.sum()) + sum(sequence.num_computed_tokens for sequence, _ in self.chunks)
        speculative = self.speculative
        if speculative is not None:
            num_context_tokens += int(speculative.positions.sum() + speculative.counts.sum())
        plan = Plan(
            step=step,
            decode_rows=rows,
            new_rows=self.new_rows,
            swapped_in=self.swapped_in,
            num_context_tokens=num_context_tokens,
        )
        for sequence, generation, blocks in self._grown:
            # A sequence preempted since has no row to grow.
            if sequence.generation == generation:
                plan.grown_rows.append(sequence.row)
                plan.num_new_blocks.append(len(blocks))
                plan.new_blocks += blocks
        plan.trimmed_rows = [
            (sequence.row, kept) for sequence, generation, kept in trimmed if sequence.generation == generation
        ]
        if not self.chunks and speculative is None:
            awaited = StepInFlight(
                step=step,
                generations=generations,
                rows=rows,
                positions=positions,
                decodes_version=decodes_version,
                is_empty=not len(rows),
            )
            return plan, awaited
        plan.chunks = [(sequence.row, count) for sequence, count in self.chunks]
        if self.drafts or speculative is not None:
            plan.num_drafts = [len(sequence.drafts) for sequence, _ in self.chunks]
            plan.draft_token_ids = [token_id for sequence, _ in self.chunks for token_id in sequence.drafts]
        sampling = {sequence.generation for sequence in self.finishing + self.drafts}
        chunked = [sequence for sequence, _ in self.chunks if sequence.generation in sampling]
        if chunked:
            generations = np.append(generations, np.array([sequence.generation for sequence in chunked], np.int64))
            rows = np.append(rows, np.array([sequence.row for sequence in chunked], np.uint16))
            positions = np.append(positions, np.array([sequence.num_tokens for sequence in chunked], np.int64))
        num_drafts = np.array([len(sequence.drafts) for sequence in chunked], np.int64) if self.drafts else None
        if speculative is not None:
            num_others = len(rows)
            generations = np.concatenate((generations, speculative.generations))
            rows = np.concatenate((rows, speculative.rows))
            positions = np.concatenate((positions, speculative.positions))
            forced, num_drafts = num_drafts, np.zeros(len(rows), np.int64)
            if forced is not None:
                num_drafts[num_others - len(forced) : num_others] = forced
            num_drafts[num_others:] = speculative.counts
            speculative.add_to(plan)
        elif num_drafts is not None:
            num_drafts = np.append(np.zeros(len(rows) - len(num_drafts), np.int64), num_drafts)
        return plan, StepInFlight(
            step=step,
            generations=generations,
            rows=rows,
            positions=positions,
            decodes_version=None if chunked or speculative is not None else decodes_version,
            num_drafts=num_drafts,
            num_expected_drafts=self.num_expected_drafts,
            has_forced=bool(self.drafts),
            finishing=[(sequence, sequence.generation) for sequence in self.finishing],
            num_prefill_tokens=sum(count for sequence, count in self.chunks if not sequence.drafts),
        )
