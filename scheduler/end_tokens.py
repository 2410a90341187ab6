"""Tokens that may end one of the running sequences, to be found in a column of sampled tokens at once."""

from collections import Counter
from collections.abc import Iterable

import numpy as np


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
