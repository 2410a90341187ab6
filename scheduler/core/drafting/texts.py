"""The tokens of running sequences and of recent outputs, one text a lane, with hashes of all their n-grams.

The hash of an n-gram is that of Rabin and Karp (1987): its tokens as the digits of a number, modulo 2**64. It follows
from two prefixes of the text, so that a token costs the same whatever n is. Equal n-grams of different texts have equal
hashes.
"""

from functools import cached_property

import numpy as np

# Calls of `add` after which a backlog is full.
_MOST_STEPS = 32


class Backlog:
    """Sampled tokens that the drafters have not processed yet."""

    def __init__(self) -> None:
        self._generations: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._token_ids: list[np.ndarray] = []
        self._num_steps = 0

    @property
    def is_full(self) -> bool:
        return self._num_steps >= _MOST_STEPS

    def add(
        self, rows_L: np.ndarray, generations_L: np.ndarray, token_ids: np.ndarray, counts_L: np.ndarray | None
    ) -> None:
        """Takes the tokens (int32) that rows got in a step: counts_L[i] each, None: one. Keeps copies."""
        self._num_steps += 1
        self._rows.append(rows_L.astype(np.int64) if counts_L is None else rows_L.astype(np.int64).repeat(counts_L))
        self._generations.append(generations_L.copy() if counts_L is None else generations_L.repeat(counts_L))
        self._token_ids.append(token_ids.astype(np.int32))

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Empties it. Returns the row and the generation of each sequence in it, all tokens, those of a sequence
        together and in order, and the number of tokens of each sequence."""
        if not self._num_steps:
            none = np.zeros(0, np.int64)
            return none, none, none.astype(np.int32), none
        generations = np.concatenate(self._generations)
        order = generations.argsort(kind="stable")
        generations_L, firsts, counts_L = np.unique(generations[order], return_index=True, return_counts=True)
        rows_L = np.concatenate(self._rows)[order[firsts]]
        token_ids = np.concatenate(self._token_ids)[order]
        self.clear()
        return rows_L, generations_L, token_ids, counts_L

    def clear(self) -> None:
        self._rows, self._generations, self._token_ids, self._num_steps = [], [], [], 0


# A text keeps nearly as many of its last tokens as this, or fewer if sequences are shorter.
_MOST_TOKENS = 1 << 16
# Odd, so that its powers have inverses modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
# A factor of splitmix64 (Steele, Lea and Flood, 2014): the high bits of a hash depend on all of its bits.
_MIX = 0xBF58476D1CE4E5B9
# The hash of an n-gram that a text is too short for.
NO_CONTEXT = np.uint64(0)


class NewTokens:
    """The tokens that rows got, those of a row together and in order. Arrays have one entry a row (L) or token (T)."""

    def __init__(self, rows_L: np.ndarray, token_ids_T: np.ndarray, counts_L: np.ndarray | None) -> None:
        """rows_L: int64. token_ids_T: int32. counts_L: the number of tokens of each row; None: one."""
        self.rows_L, self.token_ids_T, self.counts_L = rows_L, token_ids_T, counts_L

    def __len__(self) -> int:
        return len(self.rows_L)

    @cached_property
    def firsts_L(self) -> np.ndarray:
        """Index of each row's first token."""
        return np.arange(len(self.rows_L)) if self.counts_L is None else self.counts_L.cumsum() - self.counts_L

    @cached_property
    def rows_T(self) -> np.ndarray:
        return self.rows_L if self.counts_L is None else self.rows_L.repeat(self.counts_L)

    @cached_property
    def offsets_T(self) -> np.ndarray:
        """How many tokens of its row come before each."""
        if self.counts_L is None:
            return np.zeros(len(self.rows_L), np.int64)
        return np.arange(len(self.token_ids_T)) - self.firsts_L.repeat(self.counts_L)

    def only(self, are_taken_L: np.ndarray) -> "NewTokens":
        """Those of some rows, by a mask."""
        if self.counts_L is None:
            return NewTokens(self.rows_L[are_taken_L], self.token_ids_T[are_taken_L], None)
        token_ids_T = self.token_ids_T[are_taken_L.repeat(self.counts_L)]
        return NewTokens(self.rows_L[are_taken_L], token_ids_T, self.counts_L[are_taken_L])


class Texts:
    """Positions count from the beginning of a text. Arrays have one entry a lane (L), a token (T) or an order (N)."""

    def __init__(self, num_lanes: int, max_len: int) -> None:
        """max_len: tokens of the longest sequence."""
        self.width = 1 << min(max_len, _MOST_TOKENS).bit_length()
        # Positions end here.
        self.max_len = max(max_len, 4 * self.width)
        self._mask = self.width - 1
        # Both are rings of `width` entries a lane. Prefix p is the number whose digits are the tokens before position p
        # that the text has kept since it began.
        self._tokens = np.zeros(num_lanes * self.width, np.int32)
        self._prefixes = np.zeros(num_lanes * self.width, np.uint64)
        self._powers, self._inverses = _powers(_BASE, self.width), _powers(_INVERSE, self.width)
        self._mixed_powers = self._powers * np.uint64(_MIX)
        # Number of tokens of each text, and the first position that is still valid, as is the prefix there.
        self.ends_L = np.zeros(num_lanes, np.int64)
        self.starts_L = np.zeros(num_lanes, np.int64)

    def begin(self, lane: int, token_ids: np.ndarray) -> np.ndarray:
        """Replaces a text. Returns the positions that it keeps."""
        end = len(token_ids)
        start = max(0, end - self._mask)
        kept, base = token_ids[start:], lane * self.width
        positions = np.arange(start, end)
        sums = np.cumsum(_digits(kept) * self._inverses[: len(kept)])
        self._tokens[base + (positions & self._mask)] = kept
        self._prefixes[base + (start & self._mask)] = 0
        self._prefixes[base + (positions + 1 & self._mask)] = sums * self._powers[: len(kept)]
        self.ends_L[lane], self.starts_L[lane] = end, start
        return positions

    def append(self, new: NewTokens) -> np.ndarray:
        """Appends tokens to the texts of their rows. Returns their positions."""
        rows_L, bases_T = new.rows_L, new.rows_T * self.width
        ends_L = self.ends_L[rows_L]
        digits_T = _digits(new.token_ids_T)
        before_L = self._prefixes[rows_L * self.width + (ends_L & self._mask)] * self._powers[1]
        if new.counts_L is None:
            positions_T, prefixes_T, ends_after_L = ends_L, digits_T + before_L, ends_L + 1
        else:
            offsets_T, firsts_L = new.offsets_T, new.firsts_L
            positions_T, ends_after_L = ends_L.repeat(new.counts_L) + offsets_T, ends_L + new.counts_L
            # The text so far goes before the first digit.
            digits_T[firsts_L] += before_L
            digits_T *= self._inverses[offsets_T]
            sums_T = digits_T.cumsum()
            # Without those of the rows before.
            sums_T -= (sums_T - digits_T)[firsts_L].repeat(new.counts_L)
            prefixes_T = sums_T * self._powers[offsets_T]
        self._tokens[bases_T + (positions_T & self._mask)] = new.token_ids_T
        self._prefixes[bases_T + (positions_T + 1 & self._mask)] = prefixes_T
        self.ends_L[rows_L] = ends_after_L
        starts_L = ends_after_L - self._mask
        if starts_L.max(initial=0) > 0:
            self.starts_L[rows_L] = np.maximum(self.starts_L[rows_L], starts_L)
        return positions_T

    def hashes(self, lanes_T: np.ndarray, ends_T: np.ndarray, orders_N: np.ndarray) -> np.ndarray:
        """uint64 [T, N]: hashes of the n-grams of these orders, the longest first, that end before position ends_T;
        NO_CONTEXT where the text has fewer tokens before it."""
        bases_T, starts_T = lanes_T * self.width, self.starts_L[lanes_T]
        before_TN = ends_T[:, None] - orders_N
        is_there_TN = None if (before_TN[:, 0] >= starts_T).all() else before_TN >= starts_T[:, None]
        before_TN &= self._mask
        before_TN += bases_T[:, None]
        hashes = self._prefixes[before_TN]
        hashes *= self._mixed_powers[orders_N]
        prefixes_T = self._prefixes[bases_T + (ends_T & self._mask)] * self._mixed_powers[0]
        np.subtract(prefixes_T[:, None], hashes, out=hashes)
        if is_there_TN is not None:
            hashes *= is_there_TN
        return hashes

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
    """uint64: no token is the digit 0, nor is -1."""
    digits = token_ids.astype(np.uint64)
    digits += np.uint64(2)
    return digits


def _powers(base: int, count: int) -> np.ndarray:
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
