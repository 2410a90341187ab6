"""The sequences that run: each has a row, blocks, and a number for its stay."""

from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from scheduler.block_pool import BlockPool
from scheduler.request import Sequence
from scheduler.rows import Rows

_order = attrgetter("order")


class Running:
    """Keeps rows, blocks and numbers in step with who runs. Does not change a sequence's status, except by `start`."""

    def __init__(self, rows: Rows, pool: BlockPool) -> None:
        self._rows = rows
        self._pool = pool
        self._num_stays = 0
        # In order: the last is preempted first. To be read only.
        self.sequences: list[Sequence] = []
        self.by_number: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def start(self, sequence: Sequence, block_ids: list[int], num_computed_tokens: int) -> None:
        """Begins a stay. The blocks are held already; KV of so many tokens is in them."""
        self._num_stays += 1
        number, row = self._num_stays, self._rows.take()
        sequence.start(row=row, number=number, block_ids=block_ids, num_computed_tokens=num_computed_tokens)
        self.by_number[number] = sequence
        insort(self.sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Gives back its row and blocks."""
        del self.sequences[bisect_left(self.sequences, sequence.order, key=_order)]
        del self.by_number[sequence.number]
        self._pool.release(sequence.block_ids)
        self._rows.release(sequence.row)

    def forget(self) -> list[Sequence]:
        """Ends every stay, giving nothing back: the workers have lost it all. Returns those that ran."""
        sequences, self.sequences = self.sequences, []
        self.by_number.clear()
        self._rows.reset()
        self._pool.reset(self._pool.num_blocks)
        return sequences

    def check_integrity(self) -> None:
        """Asserts that order, numbers, rows and blocks agree."""
        assert self.sequences == sorted(self.sequences, key=_order), "the running are out of order"
        assert self.by_number == {sequence.number: sequence for sequence in self.sequences}
        self._rows.check_integrity([sequence.row for sequence in self.sequences])
        self._pool.check_integrity(Counter(block for sequence in self.sequences for block in sequence.block_ids))
