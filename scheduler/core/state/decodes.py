"""The sequences that decode, one token in a step or several with drafts, held as columns.

Longer than 400 lines because all that reads or writes the columns is kept together.
"""

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from scheduler.core.state.request import Sequence

_order = attrgetter("order")

# Selects entries of the columns: the first n as a slice from 0, or indices.
Selection = slice | np.ndarray
# Rows, generations and positions: what `Decodes.advance` returns.
Advanced = tuple[np.ndarray, np.ndarray, np.ndarray]


def size_of(selection: Selection) -> int:
    return selection.stop if isinstance(selection, slice) else len(selection)


@dataclass(frozen=True, slots=True)
class _Identity:
    """The sequences of a selection. Several steps share it: do not write to it."""

    rows: np.ndarray
    generations: np.ndarray
    groups: np.ndarray
    choices: np.ndarray


class Decodes:
    """The decoding sequences in order, as columns; the last is preempted first."""

    def __init__(
        self,
        num_rows: int,
        block_size: int,
        max_steps_in_flight: int,
        *,
        holds_constrained: bool = False,
        max_drafts: int = 0,
    ) -> None:
        self.block_size, self._holds_constrained = block_size, holds_constrained
        self._columns = np.zeros((16, num_rows), np.int64)
        # Views of the columns. Tokens are counted from the beginning of the prompt.
        (
            self._row,
            self._generation,
            self._group,
            self._choice,
            self._num_prompt,
            # num_computed_tokens, steps in flight included, and the drafts in them.
            self._computed,
            # Known tokens and those that steps in flight will sample, or may with drafts: computed + 1.
            self._planned,
            # num_tokens.
            self._known,
            # Number of tokens at which max_tokens ends the sequence.
            self._limit,
            # Number of tokens for which it has blocks.
            self._capacity,
            # Start of its row in `_tail`.
            self._tail_start,
            # 1 if each of its tokens may end the sequence, because of a repetition.
            self._watched,
            # 1 if the sequence is in at most one step in flight, and 1 if it is planned next only when the results of
            # all its steps are there.
            self._held,
            self._waits,
            # Draft tokens verified, and those of them that were accepted.
            self._drafted,
            self._accepted,
        ) = self._columns
        # The latest tokens of each row, stored at their position modulo the width: those sampled since the last
        # `settle`, which happens at least once a block, and those that were in flight then or come as drafts.
        self._tail_width = 1 << (block_size + max_steps_in_flight + max_drafts).bit_length()
        self._tail = np.zeros(num_rows * self._tail_width, np.int32)
        self._tail_bytes = self._tail.data.cast("B")
        # A cached identity and its key: (version, stop of the slice).
        self._identified = (-1, -1)
        self._identity_then = self._identify(slice(0, 0))
        self._index_of_row = np.zeros(num_rows, np.int64)
        self._indexed_version = -1
        # Read only for callers.
        self.sequences: list[Sequence] = []
        # Both mostly 0. The second counts sequences that are held or wait.
        self.num_watched = 0
        self.num_holding = 0
        # Grows with every sequence that is added or removed.
        self.version = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_growing(self) -> int:
        """The number of sequences that may need more blocks than they have. A last token needs none: it is never
        computed."""
        end = len(self.sequences)
        return int(np.count_nonzero(self._limit[:end] - 1 > self._capacity[:end]))

    # --- Adding and removing

    def add(self, sequence: Sequence, *, num_planned: int) -> None:
        """Adds a sequence. num_planned: its known tokens and those to come; all but the last are computed."""
        assert sequence.num_computed_tokens == num_planned - 1
        index, end = self.index_of(sequence), len(self.sequences)
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
            sequence.repetition is not None,
            self._is_held(sequence),
            0,
            sequence.num_draft_tokens,
            sequence.num_accepted_tokens,
        )
        self.num_watched += sequence.repetition is not None
        self.num_holding += self._is_held(sequence)
        self.sequences.insert(index, sequence)
        sequence.is_decoding = True
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Settles and removes a sequence."""
        index, end = self.index_of(sequence), len(self.sequences)
        self.settle(sequence)
        self.num_holding -= int(self._held[index] | self._waits[index])
        columns = self._columns
        columns[:, index : end - 1] = columns[:, index + 1 : end]
        del self.sequences[index]
        self.num_watched -= sequence.repetition is not None
        sequence.is_decoding = False
        self.version += 1

    def clear(self) -> None:
        """Settles and removes all sequences."""
        for sequence in self.sequences:
            self.settle(sequence)
            sequence.is_decoding = False
        self.sequences = []
        self.num_watched = self.num_holding = 0
        self.version += 1

    def settle(self, sequence: Sequence) -> None:
        """Brings a sequence's counts and output_token_ids up to date."""
        index = self.index_of(sequence)
        sequence.num_draft_tokens = int(self._drafted[index])
        sequence.num_accepted_tokens = int(self._accepted[index])
        self._settle(sequence, int(self._computed[index]), int(self._known[index]))

    def _is_held(self, sequence: Sequence) -> bool:
        return self._holds_constrained and sequence.group.request.is_constrained

    def index_of(self, sequence: Sequence) -> int:
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
        """The first `limit` sequences that can compute a token in the next step.

        A sequence whose last token a step in flight will sample can't; with one_step_each, neither can a sequence that
        is in any step in flight. A sequence that is held, or that `wait` was called for, can't either.
        """
        end = len(self.sequences)
        if not steps_in_flight:
            return slice(0, min(end, limit))
        planned = self._planned[:end]
        ready = planned < self._limit[:end]
        if one_step_each:
            ready &= planned == self._known[:end]
        elif self.num_holding:
            ready &= (planned == self._known[:end]) | ((self._held[:end] | self._waits[:end]) == 0)
        if ready.all():
            return slice(0, min(end, limit))
        return ready.nonzero()[0][:limit]

    def without_room(self, selection: Selection) -> np.ndarray:
        """Positions, within the selection, of the sequences that have no block for their next token."""
        return (self._computed[selection] >= self._capacity[selection]).nonzero()[0]

    def at(self, indices: np.ndarray) -> list[Sequence]:
        """The sequences at these indices, settled."""
        sequences, settle = self.sequences, self._settle
        found = [sequences[index] for index in indices.tolist()]
        computed, known = self._computed.take(indices).tolist(), self._known.take(indices).tolist()
        for sequence, num_computed, num_known in zip(found, computed, known, strict=True):
            settle(sequence, num_computed, num_known)
        return found

    def grew(self, indices: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Records that each has got so many more blocks."""
        self._capacity[indices] += num_blocks * self.block_size

    def grew_one(self, sequence: Sequence) -> None:
        self._capacity[self.index_of(sequence)] = len(sequence.block_ids) * self.block_size

    def advance(self, selection: Selection) -> Advanced:
        """Records that the selection computes its next token in the step being planned.

        Returns rows (uint16) and generations, both read only, and the positions that the sampled tokens will have,
        counted from the beginning of the prompt.
        """
        if self.num_holding:
            self._end_waits(selection)
        planned, who = self._planned[selection], self._identity(selection)
        positions = planned.copy()
        self._computed[selection] = positions
        planned += 1
        if not isinstance(selection, slice):
            self._planned[selection] = planned
        return who.rows, who.generations, positions

    def rows_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: the rows and the generations of these sequences."""
        return self._row[indices], self._generation[indices]

    def without_steps(self, selection: Selection) -> np.ndarray:
        """Mask of the sequences of a selection that are in no step in flight."""
        return self._planned[selection] == self._known[selection]

    def num_context_tokens(self, selection: Selection) -> int:
        """Tokens whose KV the selection reads to compute its next tokens."""
        return int(self._planned[selection].sum())

    def num_missing(self, indices: np.ndarray) -> np.ndarray:
        """The number of tokens that each sequence can still get."""
        return self._limit[indices] - self._known[indices]

    def draft_rooms(self, indices: np.ndarray) -> np.ndarray:
        """The number of drafts of each sequence, in no step in flight, for which it has blocks."""
        return self._capacity[indices] - self._known[indices]

    def advance_drafts(self, indices: np.ndarray, counts: np.ndarray) -> Advanced:
        """Records that sequences, in no step in flight, compute their next token and so many drafts after it in the
        step being planned. They are then in no other step until its result is there. Returns the same as `advance`."""
        who, positions = self._identify(indices), self._known[indices]
        self._computed[indices] = positions + counts
        self._planned[indices] = positions + counts + 1
        self._drafted[indices] += counts
        self.wait_all(indices)
        return who.rows, who.generations, positions

    def wait_all(self, indices: np.ndarray) -> None:
        """`wait` for each of these sequences."""
        new = indices[(self._held[indices] | self._waits[indices]) == 0]
        self._waits[new] = 1
        self.num_holding += len(new)

    def wait(self, sequence: Sequence) -> None:
        """Keeps a sequence out of steps until the results of all its steps are there: they will bring drafts."""
        index = self.index_of(sequence)
        if not (self._held[index] or self._waits[index]):
            self._waits[index] = 1
            self.num_holding += 1

    def _end_waits(self, selection: Selection) -> None:
        self.num_holding -= int(self._waits[selection].sum())
        self._waits[selection] = 0

    def waits(self, sequence: Sequence) -> bool:
        return bool(self._waits[self.index_of(sequence)])

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
        """int32: for each sequence, the output position of the next token that it will get."""
        return (self._known[selection] - self._num_prompt[selection]).astype(np.int32)

    def generations(self, selection: Selection) -> np.ndarray:
        return self._identity(selection).generations

    def keys(self, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
        """Groups (int64) and choices (int32), both read only."""
        who = self._identity(selection)
        return who.groups, who.choices

    def _identity(self, selection: Selection) -> _Identity:
        """The identity of a selection. A slice reuses the same one until a sequence is added or removed."""
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
        """Adds a sampled token (int32) to each sequence. Returns a mask of those that have reached their limit."""
        known = self._known[selection]
        self._tail[self._tail_start[selection] + (known & (self._tail_width - 1))] = token_ids
        known += 1
        if not isinstance(selection, slice):
            self._known[selection] = known
        return known >= self._limit[selection]

    def append_several(self, indices: np.ndarray, counts: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds counts[i] sampled tokens to each sequence."""
        known, firsts = self._known[indices], counts.cumsum() - counts
        positions = (known - firsts).repeat(counts) + np.arange(len(token_ids))
        self._tail[self._tail_start[indices].repeat(counts) + (positions & (self._tail_width - 1))] = token_ids
        self._known[indices] = known + counts

    def verified(self, indices: np.ndarray, num_accepted: np.ndarray) -> None:
        """Records that the drafts of sequences have been verified: the KV of rejected ones is void."""
        known = self._known[indices]
        self._computed[indices], self._planned[indices] = known - 1, known
        self._accepted[indices] += num_accepted

    def with_full_blocks(self, indices: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The indices of the sequences whose last `counts` tokens completed a block of computed tokens."""
        computed = self._known[indices] - 1
        return indices[computed // self.block_size > (computed - counts) // self.block_size]

    def with_spare_blocks(self, indices: np.ndarray) -> np.ndarray:
        """The indices of the sequences that have more blocks than their known tokens need."""
        return indices[self._capacity[indices] - self._known[indices] >= self.block_size]

    def watched(self, selection: Selection) -> np.ndarray:
        """Mask of the sequences that any token may end."""
        return self._watched[selection] != 0

    def append_one(self, sequence: Sequence, token_id: int) -> None:
        index = self.index_of(sequence)
        self.append(slice(index, index + 1), np.array([token_id], np.int32))

    def num_known(self, sequence: Sequence) -> int:
        """The number of known tokens, which `Sequence.num_tokens` lags behind until settled."""
        return int(self._known[self.index_of(sequence)])

    def num_planned(self, sequence: Sequence) -> int:
        """The number of known tokens and of those that steps in flight will sample."""
        return int(self._planned[self.index_of(sequence)])

    def check_integrity(self) -> None:
        """Settles all sequences and asserts that they agree with the columns."""
        assert self.sequences == sorted(self.sequences, key=_order), "the decodes are out of order"
        num_holding = 0
        for index, sequence in enumerate(self.sequences):
            self.settle(sequence)
            assert sequence.is_decoding
            column = self._columns[:, index].tolist()
            expected = [sequence.row, sequence.generation, *sequence.key, sequence.num_prompt_tokens]
            assert column[:5] == expected, "a column belongs to another sequence"
            computed, planned, known, limit, capacity, tail_start, watched, held, waits, *drafts = column[5:]
            assert watched == (sequence.repetition is not None)
            assert held == self._is_held(sequence)
            assert not (held and waits)
            assert drafts == [sequence.num_draft_tokens, sequence.num_accepted_tokens]
            num_holding += held + waits
            assert tail_start == sequence.row * self._tail_width
            assert known == sequence.num_tokens
            assert known <= planned == computed + 1
            assert planned <= limit == sequence.num_prompt_tokens + sequence.max_tokens
            assert computed <= capacity == len(sequence.block_ids) * self.block_size
        assert self.num_watched == sum(sequence.repetition is not None for sequence in self.sequences)
        assert self.num_holding == num_holding
