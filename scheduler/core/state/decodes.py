"""The sequences that decode one token in every step, held as columns, and the tokens that end them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from scheduler.core.state.request import Sequence


class EndTokens:
    """The union of the running sequences' end tokens, as a mask."""

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        # By token id; the last entry, for all larger ids, stays False.
        self._mask = np.zeros(1, np.bool_)

    def add(self, token_ids: frozenset[int]) -> None:
        """A sequence that any of these ends begins to run."""
        for token in token_ids:
            self._times[token] += 1
            if token + 2 > len(self._mask):
                self._mask = np.append(self._mask, np.zeros(token + 2 - len(self._mask), np.bool_))
            self._mask[token] = True

    def remove(self, token_ids: frozenset[int]) -> None:
        """It does not run any more."""
        for token in token_ids:
            self._times[token] -= 1
            if not self._times[token]:
                del self._times[token]
                self._mask[token] = False

    def among(self, token_ids: np.ndarray) -> np.ndarray:
        """Mask of those that may end a sequence; which one it would have to be is not said."""
        return self._mask.take(token_ids, mode="clip")

    def check_integrity(self, running: Iterable[frozenset[int]]) -> None:
        times = Counter(token for token_ids in running for token in token_ids)
        assert self._times == times, "end tokens are counted wrongly"
        assert set(np.flatnonzero(self._mask).tolist()) == set(times)


_order = attrgetter("order")

# Which of the columns' entries: the first so many, or by index.
Selection = slice | np.ndarray


@dataclass(frozen=True, slots=True)
class _Identity:
    """The sequences of a selection. Several steps share it, so it is to be read only."""

    rows: np.ndarray
    generations: np.ndarray
    groups: np.ndarray
    choices: np.ndarray


class Decodes:
    """In order: the last is preempted first."""

    def __init__(self, num_rows: int, block_size: int, max_steps_in_flight: int) -> None:
        self.block_size = block_size
        self._columns = np.zeros((11, num_rows), np.int64)
        # Views of the columns. Tokens are counted from the beginning of the prompt.
        (
            self._row,
            self._generation,
            self._group,
            self._choice,
            self._num_prompt,
            # num_computed_tokens, steps in flight included.
            self._computed,
            # Known tokens and those that steps in flight will sample; one more than are computed.
            self._planned,
            # num_tokens.
            self._known,
            # Tokens at which max_tokens ends it.
            self._limit,
            # Tokens for which it has blocks.
            self._capacity,
            # Where its row's latest tokens begin in `_tail`.
            self._tail_start,
        ) = self._columns
        # The latest tokens of each row, at their position modulo the width: those sampled since the last `settle`,
        # which comes once a block at least, and those that were in flight at that time.
        self._tail_width = 1 << (block_size + max_steps_in_flight).bit_length()
        self._tail = np.zeros(num_rows * self._tail_width, np.int32)
        self._tail_bytes = self._tail.data.cast("B")
        # Of all up to a bound, at some version.
        self._identified = (-1, -1)
        self._identity_then = self._identify(slice(0, 0))
        self._index_of_row = np.zeros(num_rows, np.int64)
        self._indexed_version = -1
        # To be read only.
        self.sequences: list[Sequence] = []
        # Changes with every sequence that comes or goes.
        self.version = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_growing(self) -> int:
        """Those that may need more blocks than they have. The last token of all is never computed."""
        end = len(self.sequences)
        return int(np.count_nonzero(self._limit[:end] - 1 > self._capacity[:end]))

    # --- Coming and going

    def add(self, sequence: Sequence, *, num_planned: int) -> None:
        """num_planned: its known tokens and those that steps in flight will sample; all but the last are computed."""
        assert sequence.num_computed_tokens == num_planned - 1
        index, end = self._index(sequence), len(self.sequences)
        columns, num_prompt_tokens = self._columns, sequence.num_prompt_tokens
        columns[:, index + 1 : end + 1] = columns[:, index:end]
        columns[:, index] = (
            sequence.row,
            sequence.generation,
            sequence.key[0],
            sequence.choice,
            num_prompt_tokens,
            num_planned - 1,
            num_planned,
            sequence.num_tokens,
            num_prompt_tokens + sequence.max_tokens,
            len(sequence.block_ids) * self.block_size,
            sequence.row * self._tail_width,
        )
        self.sequences.insert(index, sequence)
        sequence.is_decoding = True
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Settles it, too."""
        index, end = self._index(sequence), len(self.sequences)
        self.settle(sequence)
        columns = self._columns
        columns[:, index : end - 1] = columns[:, index + 1 : end]
        del self.sequences[index]
        sequence.is_decoding = False
        self.version += 1

    def clear(self) -> None:
        """Removes all, settled."""
        for sequence in self.sequences:
            self.settle(sequence)
            sequence.is_decoding = False
        self.sequences = []
        self.version += 1

    def settle(self, sequence: Sequence) -> None:
        """Brings its num_computed_tokens and output_token_ids up to date."""
        index = self._index(sequence)
        self._settle(sequence, int(self._computed[index]), int(self._known[index]))

    def _index(self, sequence: Sequence) -> int:
        return bisect_left(self.sequences, sequence.order, key=_order)

    def _settle(self, sequence: Sequence, num_computed: int, num_known: int) -> None:
        sequence.num_computed_tokens = num_computed
        output, width = sequence.output_token_ids, self._tail_width
        start = sequence.num_prompt_tokens + len(output)
        if start == num_known:
            return
        base = sequence.row * width
        first, last = base + start % width, base + (num_known - 1) % width + 1
        if first < last:
            output.frombytes(self._tail_bytes[4 * first : 4 * last])
        else:
            output.frombytes(self._tail_bytes[4 * first : 4 * (base + width)])
            output.frombytes(self._tail_bytes[4 * base : 4 * last])

    # --- Planning

    def select(self, limit: int, *, steps_in_flight: bool, one_step_each: bool) -> Selection:
        """The first `limit` that can compute a token in the next step.

        With steps in flight, one whose last token is to be sampled by one of them can't; with one_step_each, neither
        can one that any of them holds.
        """
        end = len(self.sequences)
        if not steps_in_flight:
            return slice(0, min(end, limit))
        planned = self._planned[:end]
        ready = planned < self._limit[:end]
        if one_step_each:
            ready &= planned == self._known[:end]
        if ready.all():
            return slice(0, min(end, limit))
        return ready.nonzero()[0][:limit]

    def without_room(self, selection: Selection) -> np.ndarray:
        """Which of the selection have no block for their next token: positions within the selection."""
        return (self._computed[selection] >= self._capacity[selection]).nonzero()[0]

    def at(self, indices: np.ndarray) -> list[Sequence]:
        """The sequences at these indices, settled."""
        sequences, found = self.sequences, []
        computed, known = self._computed.take(indices).tolist(), self._known.take(indices).tolist()
        settle = self._settle
        for index, num_computed, num_known in zip(indices.tolist(), computed, known, strict=True):
            sequence = sequences[index]
            settle(sequence, num_computed, num_known)
            found.append(sequence)
        return found

    def grew(self, indices: np.ndarray) -> None:
        """Each has got one more block."""
        self._capacity[indices] += self.block_size

    def grew_one(self, sequence: Sequence) -> None:
        self._capacity[self._index(sequence)] = len(sequence.block_ids) * self.block_size

    def advance(self, selection: Selection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The selection computes its next token in the step being planned.

        Returns rows (uint16) and generations, to be read only, and positions that the sampled tokens will have, counted
        from the prompt's beginning.
        """
        planned, who = self._planned[selection], self._identity(selection)
        positions = planned.copy()
        self._computed[selection] = positions
        planned += 1
        if not isinstance(selection, slice):
            self._planned[selection] = planned
        return who.rows, who.generations, positions

    # --- Results

    def locate(self, rows: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds sequences by rows and generations: a mask of those still here, and their indices."""
        end = len(self.sequences)
        if self._indexed_version != self.version:
            self._index_of_row[self._row[:end]] = np.arange(end)
            self._indexed_version = self.version
        indices = self._index_of_row[rows]
        here = (indices < end) & (self._generation[indices] == generations)
        return here, indices[here]

    def output_positions(self, selection: Selection) -> np.ndarray:
        """int32: where the next known token of each comes in its output."""
        return (self._known[selection] - self._num_prompt[selection]).astype(np.int32)

    def generations(self, selection: Selection) -> np.ndarray:
        return self._identity(selection).generations

    def keys(self, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
        """Groups (int64) and choices (int32), to be read only."""
        who = self._identity(selection)
        return who.groups, who.choices

    def _identity(self, selection: Selection) -> _Identity:
        """The same from step to step, while no sequence comes or goes."""
        if not isinstance(selection, slice):
            return self._identify(selection)
        which = self.version, selection.stop
        if self._identified != which:
            self._identified, self._identity_then = which, self._identify(selection)
        return self._identity_then

    def _identify(self, selection: Selection) -> _Identity:
        columns = (
            self._row[selection].astype(np.uint16),
            self._generation[selection].copy(),
            self._group[selection].copy(),
            self._choice[selection].astype(np.int32),
        )
        for column in columns:
            column.setflags(write=False)
        return _Identity(*columns)

    def append(self, selection: Selection, token_ids: np.ndarray) -> np.ndarray:
        """Adds a sampled token (int32) to each. Returns which (mask) have reached their limit."""
        known = self._known[selection]
        self._tail[self._tail_start[selection] + (known & (self._tail_width - 1))] = token_ids
        known += 1
        if not isinstance(selection, slice):
            self._known[selection] = known
        return known >= self._limit[selection]

    def append_one(self, sequence: Sequence, token_id: int) -> None:
        index = self._index(sequence)
        self.append(slice(index, index + 1), np.array([token_id], np.int32))

    def num_known(self, sequence: Sequence) -> int:
        """num_tokens, as results have made it."""
        return int(self._known[self._index(sequence)])

    def num_planned(self, sequence: Sequence) -> int:
        """Its known tokens and those that steps in flight will sample."""
        return int(self._planned[self._index(sequence)])

    def check_integrity(self) -> None:
        """Asserts that columns and sequences agree. Settles all."""
        assert self.sequences == sorted(self.sequences, key=_order), "the decodes are out of order"
        for index, sequence in enumerate(self.sequences):
            self.settle(sequence)
            assert sequence.is_decoding
            column = self._columns[:, index].tolist()
            expected = [sequence.row, sequence.generation, *sequence.key, sequence.num_prompt_tokens]
            assert column[:5] == expected, "a column belongs to another sequence"
            computed, planned, known, limit, capacity, tail_start = column[5:]
            assert tail_start == sequence.row * self._tail_width
            assert known == sequence.num_tokens
            assert known <= planned == computed + 1
            assert planned <= limit == sequence.num_prompt_tokens + sequence.max_tokens
            assert computed <= capacity == len(sequence.block_ids) * self.block_size
