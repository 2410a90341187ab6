"""A drafter that finds where the last tokens of a text came before, and proposes what followed them there."""

import numpy as np

from scheduler.core.drafting.texts import NO_CONTEXT, NewTokens, Texts

# Entries of a table: 24 bits of the hash, 8 bits of a count, 32 bits of the position plus 1. 0: empty.
_POSITION, _COUNT, _CHECK = np.uint64((1 << 32) - 1), np.uint64(1 << 32), np.uint64((1 << 64) - (1 << 40))
_COUNT_SHIFT, _MOST_COUNT = np.uint64(32), np.uint64(255)
_NO_COUNT = ~(_MOST_COUNT << _COUNT_SHIFT)
_ONE, _NO_ENTRY = np.uint64(1), np.uint64(0)
# A table has about two slots for each context, and at most 2 ** 16: 512 KiB.
_MOST_SLOTS_BITS = 16
_TOKENS_AT_ONCE = 1 << 12


class Lookup:
    """A table a lane maps contexts, the n-grams of certain orders, to the position after one of their occurrences.

    A context's entry is its latest occurrence, or, where contexts are counted, one of its most frequent next token: the
    vote of Boyer and Moore (1981) over the next tokens, in one count. A table forgets contexts whose slots others take.
    """

    def __init__(self, texts: Texts, num_lanes: int, orders: tuple[int, ...]) -> None:
        """orders: numbers of tokens of a context, in any order."""
        self._texts = texts
        # The longest first: the first that is found counts.
        self._orders_N = np.array(sorted(orders, reverse=True), np.int64)
        self.num_orders = len(orders)
        slot_bits = min(_MOST_SLOTS_BITS, (texts.width * len(orders)).bit_length())
        self._num_slots = 1 << slot_bits
        self._slot_shift, self._slot_bits = np.uint64(64 - slot_bits), np.uint64(slot_bits)
        # The last slot is that of contexts that are not there. It stays empty.
        self._table = np.zeros(num_lanes * self._num_slots + 1, np.uint64)
        # Those of each context at the end of each lane's text.
        self._hashes_LN = np.zeros((num_lanes, len(orders)), np.uint64)

    def begin(self, lane: int, positions: np.ndarray, *, counted: bool = False) -> None:
        """Forgets a lane, whose text has been replaced, and adds the contexts before these positions."""
        self._table[lane * self._num_slots : (lane + 1) * self._num_slots] = _NO_ENTRY
        for start in range(0, len(positions), _TOKENS_AT_ONCE):
            part = positions[start : start + _TOKENS_AT_ONCE]
            self.add(np.full(len(part), lane), part, counted=counted)
        lanes = np.array([lane])
        self._hashes_LN[lanes] = self._texts.hashes(lanes, self._texts.ends_L[lanes], self._orders_N)

    def add(self, lanes_T: np.ndarray, positions_T: np.ndarray, *, counted: bool = False) -> None:
        """Adds the contexts before these tokens. Of equal contexts in one call the last one counts."""
        hashes_TN = self._texts.hashes(lanes_T, positions_T, self._orders_N)
        self._put(hashes_TN, lanes_T, positions_T, counted=counted)

    def extend(self, new: NewTokens, positions_T: np.ndarray) -> None:
        """Adds the contexts before tokens that have just been appended to the texts of their rows. Of these, all tokens
        must have come by `begin` and `extend`."""
        rows_L, firsts_L = new.rows_L, new.firsts_L
        hashes_TN = self._texts.hashes(new.rows_T, positions_T + 1, self._orders_N)
        # A context is hashed once: here as the last of the text, in the next call as that before a token.
        before_LN = self._hashes_LN[rows_L]
        if new.counts_L is None:
            before_TN = before_LN
            self._hashes_LN[rows_L] = hashes_TN
        else:
            self._hashes_LN[rows_L] = hashes_TN[firsts_L + (new.counts_L - 1)]
            before_TN = np.empty_like(hashes_TN)
            before_TN[1:] = hashes_TN[:-1]
            before_TN[firsts_L] = before_LN
        self._put(before_TN, new.rows_T, positions_T, counted=False)

    def _put(self, hashes_TN: np.ndarray, lanes_T: np.ndarray, positions_T: np.ndarray, *, counted: bool) -> None:
        slots_TN, entries_TN = self._places(lanes_T, hashes_TN)
        entries_TN += (positions_T + 1).view(np.uint64)[:, None]
        if counted:
            entries_TN = self._vote(lanes_T, positions_T, entries_TN, self._table[slots_TN])
        self._table[slots_TN] = entries_TN
        self._table[-1] = _NO_ENTRY

    def _vote(
        self, lanes_T: np.ndarray, positions_T: np.ndarray, entries_TN: np.ndarray, before_TN: np.ndarray
    ) -> np.ndarray:
        """The new entries, by the entries that were there."""
        is_known = ((before_TN ^ entries_TN) & _CHECK == 0) & (before_TN != 0)
        counts = (before_TN >> _COUNT_SHIFT) & _MOST_COUNT
        # An entry that the ring has overwritten compares unequal, or is a copy of the same token: both do.
        tokens_before = self._texts.at(lanes_T[:, None], ((before_TN & _POSITION) - _ONE).view(np.int64))
        same = is_known & (tokens_before == self._texts.at(lanes_T, positions_T)[:, None])
        entries_TN = entries_TN + np.where(same, np.minimum(counts + _ONE, _MOST_COUNT), _NO_ENTRY) * _COUNT
        return np.where(is_known & ~same & (counts > 0), before_TN - _COUNT, entries_TN)

    def find(self, rows_L: np.ndarray, others_L: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """For the end of each row's text: the lane and the position of what to propose, -1 for none, and the index of
        the context's order, 0 for the longest. others_L: lanes to look in as well, -1 for none; of contexts of one
        order the text's own comes first.
        """
        hashes_LN = self._hashes_LN[rows_L]
        at_L, found_L = self._find_in(rows_L, hashes_LN)
        in_L = rows_L
        if others_L is not None and (has_other := others_L >= 0).any():
            other_at_L, other_L = self._find_in(np.maximum(others_L, 0), hashes_LN * has_other[:, None])
            is_better = (other_at_L >= 0) & ((at_L < 0) | (other_L < found_L))
            found_L = np.where(is_better, other_L, found_L)
            at_L, in_L = np.where(is_better, other_at_L, at_L), np.where(is_better, others_L, in_L)
        return in_L, at_L, found_L

    def _find_in(self, lanes_L: np.ndarray, hashes_LN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [L]: the position in the longest of these contexts' entry, -1 for none, and the context's index."""
        starts_L = self._texts.starts_L[lanes_L]
        slots_LN, checks_LN = self._places(lanes_L, hashes_LN)
        entries_LN = self._table[slots_LN]
        entries_LN ^= checks_LN
        entries_LN &= _NO_COUNT
        # An entry of its context becomes the distance from the start of the text; all others become large numbers.
        entries_LN -= (starts_L + 1).view(np.uint64)[:, None]
        found_L = (entries_LN <= _POSITION).argmax(axis=1)
        best_L = entries_LN[np.arange(len(lanes_L)), found_L]
        return np.where(best_L <= _POSITION, best_L.view(np.int64) + starts_L, -1), found_L

    def _places(self, lanes_T: np.ndarray, hashes_TN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots (int64) of contexts with these hashes, -1 for those that are not there, and their entries without a
        position (uint64)."""
        slots_TN = (hashes_TN >> self._slot_shift).view(np.int64)
        slots_TN += (lanes_T * self._num_slots)[:, None]
        if not hashes_TN.all():
            slots_TN[hashes_TN == NO_CONTEXT] = -1
        # The bits behind those of the slot.
        checks_TN = hashes_TN << self._slot_bits
        checks_TN &= _CHECK
        return slots_TN, checks_TN
