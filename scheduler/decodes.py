"""The running sequences that lack one token in every step, as columns.

In steady decode nothing about a sequence changes from step to step but its length. So these are kept as numpy columns
in batch order, and a step costs a few array operations and some Python for those that begin a block or end: with 256
decodes, 17 us instead of the 400 that a loop over objects takes.
"""

from bisect import bisect_left
from operator import attrgetter

import numpy as np

from scheduler.request import Sequence

_order = attrgetter("order")

# The columns. Tokens are counted from the beginning of the prompt.
(
    _ROW,
    _NUMBER,
    _GROUP,
    _CHOICE,
    _NUM_PROMPT,
    _COMPUTED,  # num_computed_tokens, steps in flight included
    _PLANNED,  # known tokens and those that steps in flight will sample; one more than _COMPUTED
    _KNOWN,  # num_tokens
    _LIMIT,  # tokens at which max_tokens ends it
    _CAPACITY,  # tokens for which it has blocks
) = range(10)

# Which of the columns' entries: all up to a bound, or by index.
Selection = slice | np.ndarray


class Decodes:
    """In order: the last is preempted first."""

    def __init__(self, num_rows: int, block_size: int, max_steps_in_flight: int) -> None:
        self._block_size = block_size
        self._columns = np.zeros((10, num_rows), np.int64)
        # The latest tokens of each row, at their position modulo the width: those sampled since the last `settle`,
        # which comes once a block at least, and those that were in flight at that time.
        self._tail_width = 1 << (block_size + max_steps_in_flight).bit_length()
        self._tail = np.zeros(num_rows * self._tail_width, np.int32)
        self._index_of_row = np.zeros(num_rows, np.int64)
        self._indexed_version = -1
        # To be read only.
        self.sequences: list[Sequence] = []
        # Changes with every sequence that comes or goes.
        self.version = 0

    def __len__(self) -> int:
        return len(self.sequences)

    # --- Coming and going

    def add(self, sequence: Sequence, *, num_planned: int) -> None:
        """num_planned: its known tokens and those that steps in flight will sample; all but the last are computed."""
        assert sequence.num_computed_tokens == num_planned - 1
        index, end = bisect_left(self.sequences, sequence.order, key=_order), len(self.sequences)
        columns = self._columns
        columns[:, index + 1 : end + 1] = columns[:, index:end]
        num_prompt_tokens = sequence.num_prompt_tokens
        columns[:, index] = (
            sequence.row,
            sequence.number,
            sequence.key[0],
            sequence.choice,
            num_prompt_tokens,
            num_planned - 1,
            num_planned,
            sequence.num_tokens,
            num_prompt_tokens + sequence.max_tokens,
            len(sequence.block_ids) * self._block_size,
        )
        self.sequences.insert(index, sequence)
        sequence.is_decoding = True
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Settles it, too."""
        index, end = self._index(sequence), len(self.sequences)
        self._settle(sequence, index)
        columns = self._columns
        columns[:, index : end - 1] = columns[:, index + 1 : end]
        del self.sequences[index]
        sequence.is_decoding = False
        self.version += 1

    def clear(self) -> list[Sequence]:
        """Removes all. Returns them in order."""
        for index, sequence in enumerate(self.sequences):
            self._settle(sequence, index)
            sequence.is_decoding = False
        sequences, self.sequences = self.sequences, []
        self.version += 1
        return sequences

    def settle(self, sequence: Sequence) -> None:
        """Brings its num_computed_tokens and output_token_ids up to date."""
        self._settle(sequence, self._index(sequence))

    def _index(self, sequence: Sequence) -> int:
        return bisect_left(self.sequences, sequence.order, key=_order)

    def _settle(self, sequence: Sequence, index: int) -> None:
        column = self._columns[:, index]
        sequence.num_computed_tokens = int(column[_COMPUTED])
        start, stop, width = sequence.num_tokens, int(column[_KNOWN]), self._tail_width
        if start < stop:
            base, first, last = sequence.row * width, start % width, (stop - 1) % width + 1
            tail = self._tail
            if first < last:
                sequence.output_token_ids += tail[base + first : base + last].tolist()
            else:
                sequence.output_token_ids += tail[base + first : base + width].tolist()
                sequence.output_token_ids += tail[base : base + last].tolist()

    # --- Planning

    def select(self, limit: int, *, steps_in_flight: bool, one_step_each: bool) -> Selection:
        """The first `limit` that can compute a token in the next step.

        With steps in flight, one whose last token is to be sampled by one of them can't; with one_step_each, neither
        can one that any of them holds.
        """
        end = len(self.sequences)
        if not steps_in_flight:
            return slice(0, min(end, limit))
        columns = self._columns
        ready = columns[_PLANNED, :end] < columns[_LIMIT, :end]
        if one_step_each:
            ready &= columns[_PLANNED, :end] == columns[_KNOWN, :end]
        if ready.all():
            return slice(0, min(end, limit))
        return np.flatnonzero(ready)[:limit]

    def without_room(self, selection: Selection) -> np.ndarray:
        """Which of the selection have no block for their next token: positions within the selection."""
        columns = self._columns
        return (columns[_COMPUTED, selection] >= columns[_CAPACITY, selection]).nonzero()[0]

    def at(self, selection: Selection, positions: np.ndarray) -> list[tuple[int, Sequence]]:
        """The sequences at positions of a selection, settled, each with its index."""
        indices = positions + selection.start if isinstance(selection, slice) else selection[positions]
        found = []
        for index in indices.tolist():
            sequence = self.sequences[index]
            self._settle(sequence, index)
            found.append((index, sequence))
        return found

    def grew(self, indices: list[int]) -> None:
        """Each has got one more block."""
        self._columns[_CAPACITY, indices] += self._block_size

    def grew_one(self, sequence: Sequence) -> None:
        self._columns[_CAPACITY, self._index(sequence)] = len(sequence.block_ids) * self._block_size

    def advance(self, selection: Selection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The selection computes its next token in the step being planned.

        Returns rows (uint16), numbers, and positions that the sampled tokens will have, counted from the prompt's
        beginning.
        """
        columns = self._columns
        positions = columns[_PLANNED, selection].copy()
        columns[_COMPUTED, selection] += 1
        columns[_PLANNED, selection] += 1
        return columns[_ROW, selection].astype(np.uint16), columns[_NUMBER, selection].copy(), positions

    # --- Results

    def locate(self, rows: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the sequences are that had these rows and numbers: a mask of those still here, and their indices."""
        end = len(self.sequences)
        if self._indexed_version != self.version:
            self._index_of_row[self._columns[_ROW, :end]] = np.arange(end)
            self._indexed_version = self.version
        indices = self._index_of_row[rows]
        here = (indices < end) & (self._columns[_NUMBER, np.minimum(indices, max(end - 1, 0))] == numbers)
        return here, indices[here]

    def output_positions(self, selection: Selection) -> np.ndarray:
        """Where the next known token of each comes in its output."""
        return self._columns[_KNOWN, selection] - self._columns[_NUM_PROMPT, selection]

    def numbers(self, selection: Selection) -> np.ndarray:
        return self._columns[_NUMBER, selection]

    def append_one(self, sequence: Sequence, token_id: int) -> None:
        index = self._index(sequence)
        self.append(slice(index, index + 1), np.array([token_id], np.int32))

    def append(
        self, selection: Selection, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Adds a sampled token (int32) to each.

        Returns groups (int64), choices and output positions of the tokens (int32), and which (mask) have reached their
        limit.
        """
        columns, width = self._columns, self._tail_width
        known = columns[_KNOWN, selection]
        self._tail[columns[_ROW, selection] * width + (known & (width - 1))] = token_ids
        first_tokens = (known - columns[_NUM_PROMPT, selection]).astype(np.int32)
        columns[_KNOWN, selection] += 1
        full = columns[_KNOWN, selection] >= columns[_LIMIT, selection]
        return columns[_GROUP, selection].copy(), columns[_CHOICE, selection].astype(np.int32), first_tokens, full

    def num_known(self, sequence: Sequence) -> int:
        """num_tokens, as results have made it."""
        return int(self._columns[_KNOWN, self._index(sequence)])

    def num_planned(self, sequence: Sequence) -> int:
        return int(self._columns[_PLANNED, self._index(sequence)])

    def check_integrity(self) -> None:
        """Asserts that columns and sequences agree. Settles all."""
        assert self.sequences == sorted(self.sequences, key=_order), "the decodes are out of order"
        for index, sequence in enumerate(self.sequences):
            self._settle(sequence, index)
            column = self._columns[:, index]
            expected = (sequence.row, sequence.number, *sequence.key, sequence.num_prompt_tokens)
            assert tuple(column[:5].tolist()) == expected, "a column belongs to another sequence"
            assert sequence.is_decoding
            assert column[_KNOWN] == sequence.num_tokens
            assert column[_KNOWN] <= column[_PLANNED] == column[_COMPUTED] + 1
            assert column[_PLANNED] <= column[_LIMIT] == sequence.num_prompt_tokens + sequence.max_tokens
            assert column[_COMPUTED] <= column[_CAPACITY] == len(sequence.block_ids) * self._block_size
