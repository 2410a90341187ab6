"""The tokens of running sequences and of recent outputs, one text a lane, with hashes of all their n-grams.

The hash of an n-gram is that of Rabin and Karp (1987): its tokens as the digits of a number, modulo 2**64. It follows
from two prefix sums, so that a token costs the same whatever n is. Equal n-grams of different texts have equal hashes.
"""

import numpy as np

# A text keeps as many of its last tokens as this, or fewer if sequences are shorter.
_MOST_TOKENS = 1 << 16
# Odd, so that its powers have inverses modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
# One round of splitmix64's finalizer (Steele, Lea and Flood, 2014): the high bits of a hash depend on all of its bits.
_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(31)


class Texts:
    """Positions count from the beginning of a text. Arrays have one entry a lane (L), a token (T) or an order (N)."""

    def __init__(self, num_lanes: int, max_len: int) -> None:
        """max_len: tokens of the longest sequence."""
        self.width = 1 << min(max_len, _MOST_TOKENS).bit_length()
        # Positions end here.
        self.max_len = max_len = max(max_len, 4 * self.width)
        self._mask = self.width - 1
        # Both are rings of `width` entries a lane. Sum p is that of the digits up to position p.
        self._tokens = np.zeros(num_lanes * self.width, np.int32)
        self._sums = np.zeros(num_lanes * self.width, np.uint64)
        self._powers, self._inverses = _powers(_BASE, max_len + 1), _powers(_INVERSE, max_len + 1)
        # Number of tokens of each text, and the first position that is still valid.
        self.ends_L = np.zeros(num_lanes, np.int64)
        self.starts_L = np.zeros(num_lanes, np.int64)

    def begin(self, lane: int, token_ids: np.ndarray) -> np.ndarray:
        """Replaces a text. Returns the positions that it keeps."""
        end = len(token_ids)
        start = max(0, end - self.width)
        sums = np.cumsum(_digits(token_ids) * self._powers[:end])
        positions = np.arange(start, end)
        places = lane * self.width + (positions & self._mask)
        self._tokens[places], self._sums[places] = token_ids[start:], sums[start:]
        self.ends_L[lane], self.starts_L[lane] = end, start
        return positions

    def append(
        self, lanes_L: np.ndarray, token_ids: np.ndarray, counts_L: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Appends counts_L[i] tokens (None: one) to each text. Returns the lane and the position of each token."""
        ends = self.ends_L[lanes_L]
        before = np.where(ends > 0, self._sums[lanes_L * self.width + (ends - 1 & self._mask)], np.uint64(0))
        if counts_L is None:
            lanes_T, positions_T = lanes_L, ends
            sums = before + _digits(token_ids) * self._powers[positions_T]
            self.ends_L[lanes_L] = ends + 1
        else:
            firsts = counts_L.cumsum() - counts_L
            index = np.arange(len(lanes_L)).repeat(counts_L)
            lanes_T, positions_T = lanes_L[index], (ends - firsts)[index] + np.arange(len(token_ids))
            sums = np.cumsum(_digits(token_ids) * self._powers[positions_T])
            # Without the texts before it in the batch.
            others = np.where(firsts > 0, sums[firsts - 1], np.uint64(0))
            sums += (before - others)[index]
            self.ends_L[lanes_L] = ends + counts_L
        places = lanes_T * self.width + (positions_T & self._mask)
        self._tokens[places], self._sums[places] = token_ids, sums
        self.starts_L[lanes_L] = np.maximum(self.starts_L[lanes_L], self.ends_L[lanes_L] - self.width)
        return lanes_T, positions_T

    def hashes(
        self, lanes_T: np.ndarray, ends_T: np.ndarray, orders_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """uint64 [T, N]: hashes of the n-grams of these orders, the longest first, that end before position ends_T.
        bool [T, N]: the text has so many tokens there; None: all have."""
        base_T, starts_T = lanes_T * self.width, self.starts_L[lanes_T]
        before_TN = ends_T[:, None] - orders_N
        sums_TN = self._sums[base_T[:, None] + (before_TN - 1 & self._mask)]
        is_there_TN = None
        if not (before_TN[:, 0] > starts_T).all():
            # The ring has no sum of the token before its oldest one.
            is_there_TN = (before_TN == 0) | (before_TN > starts_T[:, None])
            sums_TN[before_TN <= 0] = 0
            before_TN = np.maximum(before_TN, 0)
        hashes = self._sums[base_T + (ends_T - 1 & self._mask)][:, None] - sums_TN
        hashes *= self._inverses[before_TN]
        hashes += orders_N.astype(np.uint64)
        hashes ^= hashes >> _SHIFT
        hashes *= _MIX
        return hashes, is_there_TN

    def at(self, lanes: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32: the tokens at positions that the texts keep; of equal shapes."""
        return self._tokens[lanes * self.width + (positions & self._mask)]

    def copies(self, lanes_L: np.ndarray, positions_L: np.ndarray, count: int) -> np.ndarray:
        """int32 [L, count]: the tokens of each text from a position on. Where the text ends, its tokens from that
        position on come again, as in a copy of Lempel and Ziv (1977) that overlaps itself."""
        left_L = self.ends_L[lanes_L] - positions_L
        offsets = np.arange(count) % left_L[:, None] if left_L.min(initial=count) < count else np.arange(count)
        return self.at(lanes_L[:, None], positions_L[:, None] + offsets)


def _digits(token_ids: np.ndarray) -> np.ndarray:
    """uint64: no token is the digit 0."""
    return (token_ids.astype(np.int64) + 2).astype(np.uint64)


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
