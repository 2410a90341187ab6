"""The tokens that end running sequences."""

from collections import Counter
from collections.abc import Iterable

import numpy as np


class EndTokens:
    """The union of the running sequences' end tokens, as a mask."""

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        # Indexed by token id; the last entry stands for all larger ids and stays False.
        self._mask = np.zeros(1, np.bool_)

    def add(self, token_ids: frozenset[int]) -> None:
        """Adds the end tokens of a sequence that begins to run."""
        for token in token_ids:
            self._times[token] += 1
            if token + 2 > len(self._mask):
                self._mask = np.append(self._mask, np.zeros(token + 2 - len(self._mask), np.bool_))
            self._mask[token] = True

    def remove(self, token_ids: frozenset[int]) -> None:
        """Removes the end tokens of a sequence that no longer runs."""
        for token in token_ids:
            self._times[token] -= 1
            if not self._times[token]:
                del self._times[token]
                self._mask[token] = False

    def among(self, token_ids: np.ndarray) -> np.ndarray:
        """Mask of the tokens that end at least one running sequence, not necessarily the one that got the token."""
        return self._mask.take(token_ids, mode="clip")

    def check_integrity(self, running: Iterable[frozenset[int]]) -> None:
        times = Counter(token for token_ids in running for token in token_ids)
        assert self._times == times, "end tokens are counted wrongly"
        assert set(np.flatnonzero(self._mask).tolist()) == set(times)
