"""How often drafts turn out right: by row, lately, and by the drafter and the length of the context over all rows.

Every token is compared with what was proposed for it, planned as a draft or not. So a row in which no draft pays is
watched on at no cost, and gets drafts again once its text turns predictable.
"""

import numpy as np

# A proposal counts half after about 22 later ones of its row, and after about 700 of its kind.
_ROW_DECAY, _KIND_DECAY = 0.97, 0.999
# The rate of a kind counts in a row's rate as so many proposals.
_WEIGHT_OF_KIND = 4.0
# A kind begins as if it had made so many proposals, and this share of them had been right.
_FIRST_TRIES, _FIRST_RATE = 8.0, 0.4
# No draft is certain: a text that repeats itself may end at any token.
MOST_RATE = 0.98


class Rates:
    """Arrays have one entry a drafter (D), a row (R) or a level (N), the index of a context's order."""

    def __init__(self, num_drafters: int, num_rows: int, num_levels: int) -> None:
        self._hits_DR = np.zeros((num_drafters, num_rows))
        self._tries_DR = np.zeros((num_drafters, num_rows))
        self._hits_DN = np.full((num_drafters, num_levels), _FIRST_RATE * _FIRST_TRIES)
        self._tries_DN = np.full((num_drafters, num_levels), _FIRST_TRIES)
        self._powers = _ROW_DECAY ** np.arange(256)

    def begin(self, row: int) -> None:
        """Forgets what was in a row."""
        self._hits_DR[:, row] = self._tries_DR[:, row] = 0.0

    def forget_rows(self) -> None:
        self._hits_DR[:] = self._tries_DR[:] = 0.0

    def note(
        self, drafter: int, rows_L: np.ndarray, levels_L: np.ndarray, hits_L: np.ndarray, tries_L: np.ndarray
    ) -> None:
        """Takes the proposals that were compared with tokens since, and how many of them were right; of a row that has
        none, both are 0."""
        hits_R, tries_R, decay_L = self._hits_DR[drafter], self._tries_DR[drafter], self._powers[tries_L]
        hits_R[rows_L] = hits_R[rows_L] * decay_L + hits_L
        tries_R[rows_L] = tries_R[rows_L] * decay_L + tries_L
        hits_N, tries_N = self._hits_DN[drafter], self._tries_DN[drafter]
        new_tries_N = np.bincount(levels_L, tries_L, len(tries_N))
        decay_N = _KIND_DECAY**new_tries_N
        hits_N *= decay_N
        tries_N *= decay_N
        hits_N += np.bincount(levels_L, hits_L, len(hits_N))
        tries_N += new_tries_N

    def of(self, drafter: int, rows_L: np.ndarray, levels_L: np.ndarray) -> np.ndarray:
        """float64 [L]: the probability that a row's next proposal is right, if those before it are."""
        kind_N = self._hits_DN[drafter] * (_WEIGHT_OF_KIND / self._tries_DN[drafter])
        rates_L = self._hits_DR[drafter][rows_L] + kind_N[levels_L]
        rates_L /= self._tries_DR[drafter][rows_L] + _WEIGHT_OF_KIND
        return np.minimum(rates_L, MOST_RATE)

    def save(self) -> tuple[list[list[float]], list[list[float]]]:
        """Returns the hits and the tries of each kind, for `restore`."""
        return self._hits_DN.tolist(), self._tries_DN.tolist()

    def restore(self, hits: list[list[float]], tries: list[list[float]]) -> None:
        self._hits_DN[:], self._tries_DN[:] = hits, tries
