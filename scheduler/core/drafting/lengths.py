"""How long outputs get: by those that have ended lately."""

from collections.abc import Sequence

import numpy as np

# Outputs that are known, at most.
_MOST_KNOWN = 256
# An output that is longer than all others goes on as long as few of them ended near its length, from this share of it.
_NEAR = 2 / 3


class OutputLengths:
    def __init__(self) -> None:
        # In the order of their ends, the oldest first, and from the shortest to the longest.
        self._lengths: list[int] = []
        self._sorted = np.zeros(0)
        # The sum of the shortest i.
        self._sums = np.zeros(1)

    def add(self, length: int) -> None:
        self.restore([*self._lengths[1 - _MOST_KNOWN :], length])

    def coming(self, lengths_L: np.ndarray) -> np.ndarray:
        """float64 [L]: the number of tokens that outputs of these lengths should still get.

        It is the mean of those that got longer. One more counts that gets as many as it has, divided by the number of
        outputs that ended shortly before its length: so an output of which nothing is known gets as many as it has.
        """
        first_L = self._sorted.searchsorted(_NEAR * lengths_L, "right")
        last_L = self._sorted.searchsorted(lengths_L, "right")
        num_longer_L = len(self._sorted) - last_L
        tokens_L = self._sums[-1] - self._sums[last_L] - num_longer_L * lengths_L
        return (tokens_L + lengths_L / (last_L - first_L + 1)) / (num_longer_L + 1)

    def save(self) -> list[int]:
        return list(self._lengths)

    def restore(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._sorted = np.sort(np.array(lengths, np.float64))
        self._sums = np.append(0.0, self._sorted.cumsum())
