"""A drafter that finds where the last tokens of a text came before, and proposes what followed them there."""

import numpy as np

from scheduler.core.drafting.texts import Texts

# Entries of a table: 23 bits of the hash, 8 bits of a count, 32 bits of the position plus 1. 0: empty.
_POSITION, _COUNT, _CHECK, _CHECK_BITS = (1 << 32) - 1, 1 << 32, 40, 23
_CHECK_MASK = np.uint64((1 << _CHECK_BITS) - 1)
_MOST_COUNT = 255
# A table has about two slots for each context, and at most 2 ** 16: 512 KiB.
_MOST_SLOTS_BITS = 16
_TOKENS_AT_ONCE = 1 << 12


class Lookup:
    """A table a lane maps contexts, the n-grams of certain orders, to the position after one of their occurrences.

    A context's entry is its latest occurrence, or, with `by_frequency`, one of its most frequent next token: the vote
    of Boyer and Moore (1981) over the next tokens, in one count. A table forgets contexts whose slots others take.
    """

    def __init__(self, texts: Texts, num_lanes: int, orders: tuple[int, ...], *, by_frequency: bool) -> None:
        """orders: numbers of tokens of a context, in any order."""
        self._texts, self._by_frequency = texts, by_frequency
        # The longest first: the first that is found counts.
        self._orders_N = np.array(sorted(orders, reverse=True), np.int64)
        self.num_orders = len(orders)
        slot_bits = min(_MOST_SLOTS_BITS, (texts.width * len(orders)).bit_length())
        self._num_slots = 1 << slot_bits
        self._slot_shift, self._check_shift = np.uint64(64 - slot_bits), np.uint64(64 - slot_bits - _CHECK_BITS)
        self._table = np.zeros(num_lanes * self._num_slots, np.int64)

    def begin(self, lane: int, positions: np.ndarray) -> None:
        """Forgets a lane, whose text has been replaced, and adds the contexts before these positions."""
        self._table[lane * self._num_slots : (lane + 1) * self._num_slots] = 0
        for start in range(0, len(positions), _TOKENS_AT_ONCE):
            part = positions[start : start + _TOKENS_AT_ONCE]
            self.add(np.full(len(part), lane), part)

    def add(self, lanes_T: np.ndarray, positions_T: np.ndarray) -> None:
        """Adds the contexts before these tokens. Of equal contexts in one call the last one counts."""
        hashes, is_there = self._texts.hashes(lanes_T, positions_T, self._orders_N)
        slots, checks = self._places(lanes_T, hashes)
        entries = checks + (positions_T + 1)[:, None]
        if self._by_frequency:
            entries = self._vote(lanes_T, positions_T, entries, self._table[slots])
        if is_there is None:
            self._table[slots] = entries
        else:
            self._table[slots[is_there]] = entries[is_there]

    def _vote(
        self, lanes_T: np.ndarray, positions_T: np.ndarray, entries: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """The new entries, by the entries that were there: [T, N]."""
        is_known = ((before ^ entries) >> _CHECK == 0) & (before != 0)
        counts = (before >> 32) & _MOST_COUNT
        # An entry that the ring has overwritten compares unequal, or is a copy of the same token: both do.
        same = is_known & (
            self._texts.at(lanes_T[:, None], (before & _POSITION) - 1) == self._texts.at(lanes_T, positions_T)[:, None]
        )
        entries = entries + np.where(same, np.minimum(counts + 1, _MOST_COUNT), 0) * _COUNT
        return np.where(is_known & ~same & (counts > 0), before - _COUNT, entries)

    def find(self, lanes_L: np.ndarray, others_L: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """For the end of each text: the lane and the position of what to propose, and the index of the context's order,
        0 for the longest; -1 if it has none. others_L: lanes to look in as well, -1 for none; of contexts of one order
        the text's own comes first.
        """
        texts = self._texts
        hashes, is_there = texts.hashes(lanes_L, texts.ends_L[lanes_L], self._orders_N)
        positions_LN = self._find_in(lanes_L, hashes, is_there)
        found_L = (positions_LN >= 0).argmax(axis=1)
        index = np.arange(len(lanes_L))
        at_L, in_L = positions_LN[index, found_L], lanes_L
        if others_L is not None and (has_other := others_L >= 0).any():
            is_there = has_other[:, None] if is_there is None else is_there & has_other[:, None]
            positions_LN = self._find_in(np.maximum(others_L, 0), hashes, is_there)
            other_L = (positions_LN >= 0).argmax(axis=1)
            is_there_L = positions_LN[index, other_L] >= 0
            is_better = is_there_L & ((at_L < 0) | (other_L < found_L))
            found_L = np.where(is_better, other_L, found_L)
            at_L = np.where(is_better, positions_LN[index, other_L], at_L)
            in_L = np.where(is_better, others_L, in_L)
        return in_L, at_L, np.where(at_L >= 0, found_L, -1)

    def _find_in(self, lanes_L: np.ndarray, hashes: np.ndarray, is_there: np.ndarray | None) -> np.ndarray:
        """int64 [L, N]: the positions of the entries of these contexts; -1: none. is_there: None: everywhere."""
        slots, checks = self._places(lanes_L, hashes)
        entries = self._table[slots]
        positions = (entries & _POSITION) - 1
        is_good = (entries ^ checks) < _COUNT << 8
        is_good &= positions >= self._texts.starts_L[lanes_L][:, None]
        if is_there is not None:
            is_good &= is_there
        return np.where(is_good, positions, -1)

    def _places(self, lanes_T: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots, and entries without a position."""
        slots = (hashes >> self._slot_shift).view(np.int64)
        slots += (lanes_T * self._num_slots)[:, None]
        # The bits behind those of the slot.
        checks = ((hashes >> self._check_shift) & _CHECK_MASK).view(np.int64) << _CHECK
        return slots, checks
