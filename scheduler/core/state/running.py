"""The running sequences: their rows and blocks, and the plans in flight.

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

from scheduler.core.pacing.pace import StepTiming
from scheduler.core.state.blocks import BlockPool
from scheduler.core.state.decodes import Decodes
from scheduler.core.state.request import Sequence


class Rows:
    """The rows of the workers: which are free, and which rest until the steps that may name them have returned."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Frees every row: the workers have lost them all."""
        # Low row numbers are taken first.
        self._free = list(range(self.num_rows - 1, -1, -1))
        # (last step that may name it, row), in order: the row is free once that step has returned.
        self._resting: deque[tuple[int, int]] = deque()
        # Released rows that no plan has listed as freed yet.
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int, *, last_step: int) -> None:
        """Releases a row; the next plan lists it as freed. It can be taken once the result of `last_step` is there; 0:
        at once, even by the next plan, because a plan frees rows before it fills them."""
        self._untold.append(row)
        if last_step:
            self._resting.append((last_step, row))
        else:
            self._free.append(row)

    def step_returned(self, step: int) -> None:
        while self._resting and self._resting[0][0] <= step:
            self._free.append(self._resting.popleft()[1])

    def take_freed(self) -> list[int]:
        """Returns the rows released since the last plan, for the plan being made."""
        freed, self._untold = self._untold, []
        return freed

    def save(self) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Returns free, resting and untold rows, for `restore`."""
        return list(self._free), list(self._resting), list(self._untold)

    def restore(self, free: list[int], resting: list[tuple[int, int]], untold: list[int]) -> None:
        """Takes what `save` returned; all other rows are in use."""
        self._free, self._resting, self._untold = list(free), deque(resting), list(untold)

    def check_integrity(self, used: list[int]) -> None:
        """Asserts that every row is either free, or resting, or used by one sequence."""
        idle = self._free + [row for _, row in self._resting]
        assert sorted(idle + used) == list(range(self.num_rows)), "a row is lost or used twice"
        assert set(self._untold) <= set(idle), "a row is to be freed while it is used"


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
        total = 0
        for sequence in self.prefilling:
            total += sequence.num_tokens - sequence.num_computed_tokens
        return total

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
    """The sequences that sample in one plan, in batch order, as columns: decodes without drafts, those with drafts, and
    prefills that are completed."""

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
        total = 0
        for awaited in self._awaited:
            total += awaited.num_prefill_tokens
        return total

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
