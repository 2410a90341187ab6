"""The sequences that run: each has a row, blocks, and a number for its stay.

They are in one of three lists: those that decode steadily, those that have drafts to verify, and those that lack more
than one token.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

from scheduler.block_pool import BlockPool
from scheduler.decodes import Decodes
from scheduler.request import Sequence
from scheduler.rows import Rows

_order = attrgetter("order")


class Running:
    """Keeps rows, blocks, numbers and lists in step with who runs. Does not change a sequence's status, except by
    `start`."""

    def __init__(self, rows: Rows, pool: BlockPool, decodes: Decodes) -> None:
        self._rows = rows
        self._pool = pool
        # So far; the number of the latest.
        self.num_stays = 0
        self.decodes = decodes
        # In order; to be read only.
        self.drafting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.by_number: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.by_number)

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

    def from_last(self) -> Iterator[Sequence]:
        """All, the last in order first."""
        lists = (self.decodes.sequences, self.drafting, self.prefilling)
        return merge(*map(reversed, lists), key=_order, reverse=True)

    def start(self, sequence: Sequence, block_ids: list[int], num_computed_tokens: int) -> None:
        """Begins a stay, as a prefill. The blocks are held already; KV of so many tokens is in them."""
        self.num_stays += 1
        number, row = self.num_stays, self._rows.take()
        sequence.start(row=row, number=number, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
        self.by_number[number] = sequence
        insort(self.prefilling, sequence, key=_order)

    def restore(self, sequence: Sequence, *, is_decoding: bool) -> None:
        """Goes on with a stay that a saved core had: the sequence has its row, blocks and number already."""
        self.by_number[sequence.number] = sequence
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
        del self.by_number[sequence.number]
        self._pool.release(sequence.block_ids)
        self._rows.release(sequence.row, last_step=last_step)

    def forget(self) -> list[Sequence]:
        """Ends every stay, giving nothing back: the workers have lost it all. Returns those that ran, in order."""
        sequences = sorted(self.by_number.values(), key=_order)
        self.decodes.clear()
        self.drafting, self.prefilling = [], []
        self.by_number.clear()
        self._rows.reset()
        self._pool.reset(self._pool.num_blocks)
        return sequences

    def check_integrity(self) -> None:
        """Asserts that lists, numbers, rows and blocks agree."""
        self.decodes.check_integrity()
        sequences = list(self.from_last())
        assert self.by_number == {sequence.number: sequence for sequence in sequences}
        assert all(sequence.drafts for sequence in self.drafting)
        assert not any(sequence.drafts or sequence.is_decoding for sequence in self.prefilling)
        self._rows.check_integrity([sequence.row for sequence in sequences])
        self._pool.check_integrity(Counter(block for sequence in sequences for block in sequence.block_ids))


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(sequences, sequence.order, key=_order)
    assert sequences[index] is sequence
    del sequences[index]
