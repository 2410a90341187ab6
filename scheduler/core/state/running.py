"""The sequences that run: their rows and blocks, the plan being made for them, and the plans in flight.

A running sequence is in one of three lists: those that decode steadily, those that have drafts to verify, and those
that lack more than one token.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter

import numpy as np

from scheduler.core.messages import Plan, PlannedRow
from scheduler.core.state.blocks import BlockPool
from scheduler.core.state.decodes import Decodes
from scheduler.core.state.request import Sequence


class Rows:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """The workers have forgotten every row."""
        # Low generations go first.
        self._free = list(range(self.num_rows - 1, -1, -1))
        # (last step that may name it, row), in order: not to be used before that step has returned.
        self._resting: deque[tuple[int, int]] = deque()
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int, *, last_step: int) -> None:
        """The next plan frees the row. Others get it once the result of `last_step` is there; 0: at once, even by the
        next plan, which frees rows before it fills them."""
        self._untold.append(row)
        if last_step:
            self._resting.append((last_step, row))
        else:
            self._free.append(row)

    def step_returned(self, step: int) -> None:
        while self._resting and self._resting[0][0] <= step:
            self._free.append(self._resting.popleft()[1])

    def take_freed(self) -> list[int]:
        """Rows released since the last plan, for the one being made."""
        freed, self._untold = self._untold, []
        return freed

    def save(self) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Free rows, resting ones and those untold: for `restore`."""
        return list(self._free), list(self._resting), list(self._untold)

    def restore(self, free: list[int], resting: list[tuple[int, int]], untold: list[int]) -> None:
        """Takes what `save` gave; all other rows are used."""
        self._free, self._resting, self._untold = list(free), deque(resting), list(untold)

    def check_integrity(self, used: list[int]) -> None:
        """Asserts that every row is either free, or resting, or used by one sequence."""
        idle = self._free + [row for _, row in self._resting]
        assert sorted(idle + used) == list(range(self.num_rows)), "a row is lost or used twice"
        assert set(self._untold) <= set(idle), "a row is to be freed while it is used"


_order = attrgetter("order")


class Running:
    """Keeps rows, blocks, generations and lists in step with the sequences that run. Does not change a sequence's
    status, except by `start`."""

    def __init__(self, rows: Rows, pool: BlockPool, decodes: Decodes) -> None:
        self._rows = rows
        self._pool = pool
        # So far. A sequence gets a new one, counted from 1, each time it takes a row.
        self.num_generations = 0
        self.decodes = decodes
        # In order; to be read only.
        self.drafting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.by_generation: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.by_generation)

    @property
    def num_growing(self) -> int:
        """Those that may need more blocks than they have."""
        block_size = self.decodes.block_size
        others = self.drafting + self.prefilling
        num_others = sum(s.max_num_tokens_with_kv > len(s.block_ids) * block_size for s in others)
        return self.decodes.num_growing + num_others

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens of those that prefill which no plan has taken yet."""
        return sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in self.prefilling)

    def num_known(self, sequence: Sequence) -> int:
        """Its num_tokens, whether it decodes or not."""
        return self.decodes.num_known(sequence) if sequence.is_decoding else sequence.num_tokens

    def from_last(self) -> Iterator[Sequence]:
        """All, the last in order first."""
        lists = (self.decodes.sequences, self.drafting, self.prefilling)
        return merge(*map(reversed, lists), key=_order, reverse=True)

    def start(self, sequence: Sequence, block_ids: list[int], num_computed_tokens: int) -> None:
        """A sequence takes a row, as a prefill. The blocks are held already; KV of so many tokens is in them."""
        self.num_generations += 1
        generation, row = self.num_generations, self._rows.take()
        sequence.start(row=row, generation=generation, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
        self.by_generation[generation] = sequence
        insort(self.prefilling, sequence, key=_order)

    def restore(self, sequence: Sequence, *, is_decoding: bool) -> None:
        """Goes on as in a saved core: the sequence has its row, blocks and generation already."""
        self.by_generation[sequence.generation] = sequence
        if is_decoding:
            self.decodes.add(sequence, num_planned=sequence.num_computed_tokens + 1)
        else:
            insort(self.drafting if sequence.drafts else self.prefilling, sequence, key=_order)

    def decode(self, sequence: Sequence, *, num_planned: int) -> None:
        """From now on it lacks one token in every step; see `Decodes.add`."""
        _remove(self.drafting if sequence.drafts else self.prefilling, sequence)
        sequence.drafts = ()
        self.decodes.add(sequence, num_planned=num_planned)

    def draft(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """These are to be tried next, and no step that holds it is in flight."""
        if sequence.is_decoding:
            self.decodes.remove(sequence)
            insort(self.drafting, sequence, key=_order)
        sequence.drafts = drafts

    def remove(self, sequence: Sequence, *, last_step: int) -> None:
        """Gives back its row and blocks. last_step: the last step in flight; 0: none is."""
        if sequence.is_decoding:
            self.decodes.remove(sequence)
        else:
            _remove(self.drafting if sequence.drafts else self.prefilling, sequence)
        del self.by_generation[sequence.generation]
        self._pool.release(sequence.block_ids)
        self._rows.release(sequence.row, last_step=last_step)

    def forget(self) -> list[Sequence]:
        """Removes all, giving nothing back: the workers have lost it all. Returns those that ran, in order."""
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
    # The position is that of the first sampled token, counted from the prompt's beginning.
    generations: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    # `Decodes.version` if the columns are the first decodes, in order, as they were then; None: they are not.
    decodes_version: int | None
    # Draft tokens, by generation.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Those that decode from then on, with their generations at the time of the plan.
    finishing: list[tuple[Sequence, int]] = field(default_factory=list)
    # Tokens of prefills that it computes.
    num_prefill_tokens: int = 0
    # Nothing is computed in it.
    is_empty: bool = False


class InFlight:
    """In the order of the plans, which is that of the results."""

    def __init__(self) -> None:
        self._awaited: deque[StepInFlight] = deque()

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._awaited)

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def last_step(self) -> int:
        """0: none is in flight."""
        return self._awaited[-1].step if self._awaited else 0

    @property
    def first_step(self) -> int:
        """The step of the next result; 0: none is in flight."""
        return self._awaited[0].step if self._awaited else 0

    @property
    def is_computing(self) -> bool:
        """A step in flight computes something."""
        return any(not awaited.is_empty for awaited in self._awaited)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(awaited.num_prefill_tokens for awaited in self._awaited)

    def add(self, awaited: StepInFlight) -> None:
        self._awaited.append(awaited)

    def take(self, step: int) -> StepInFlight | None:
        """Removes the step whose result has come; None if it is not the next one."""
        return self._awaited.popleft() if self._awaited and self._awaited[0].step == step else None

    def clear(self) -> None:
        self._awaited.clear()

    @property
    def generations(self) -> set[int]:
        """Those of which tokens are awaited."""
        return {generation for awaited in self._awaited for generation in awaited.generations.tolist()}


class PlanDraft:
    """Collects what one step computes. Decodes come last, when none can lose its place to another any more."""

    __slots__ = ("_grown", "chunks", "drafts", "finishing", "lacks_blocks", "new_rows", "swapped_in")

    def __init__(self) -> None:
        self.new_rows: list[PlannedRow] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.chunks: list[tuple[Sequence, int]] = []
        # Of `chunks`, those that sample one token, and those that verify drafts.
        self.finishing: list[Sequence] = []
        self.drafts: list[Sequence] = []
        # A sequence has been preempted, or sits the step out, for want of blocks.
        self.lacks_blocks = False
        # (sequence, its generation then, blocks)
        self._grown: list[tuple[Sequence, int, list[int]]] = []

    def add_row(self, sequence: Sequence) -> None:
        """Tells the workers of a sequence that has just begun to run."""
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
            )
        )

    def grow(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.block_ids += blocks
        self._grown.append((sequence, sequence.generation, blocks))

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
    ) -> tuple[Plan, StepInFlight]:
        """The plan, but for freed rows and swaps out, and what its result is to bring.

        decodes: rows, generations and positions, as `Decodes.advance` gives them.
        """
        rows, generations, positions = decodes
        plan = Plan(step=step, decode_rows=rows, new_rows=self.new_rows, swapped_in=self.swapped_in)
        for sequence, generation, blocks in self._grown:
            # One preempted since has no row to grow.
            if sequence.generation == generation:
                plan.grown_rows.append(sequence.row)
                plan.num_new_blocks.append(len(blocks))
                plan.new_blocks += blocks
        plan.trimmed_rows = [
            (sequence.row, kept) for sequence, generation, kept in trimmed if sequence.generation == generation
        ]
        if not self.chunks:
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
        plan.drafts = [(sequence.row, sequence.drafts) for sequence in self.drafts]
        sampling = {sequence.generation for sequence in self.finishing + self.drafts}
        chunked = [sequence for sequence, _ in self.chunks if sequence.generation in sampling]
        return plan, StepInFlight(
            step=step,
            generations=np.append(generations, np.array([sequence.generation for sequence in chunked], np.int64)),
            rows=np.append(rows, np.array([sequence.row for sequence in chunked], np.uint16)),
            positions=np.append(positions, np.array([sequence.num_tokens for sequence in chunked], np.int64)),
            decodes_version=None if chunked else decodes_version,
            drafts={sequence.generation: sequence.drafts for sequence in self.drafts},
            finishing=[(sequence, sequence.generation) for sequence in self.finishing],
            num_prefill_tokens=sum(count for sequence, count in self.chunks if not sequence.drafts),
        )
