"""Tokens that the drafters take later."""

import numpy as np

# Calls of `add` after which a backlog is full.
_MOST_STEPS = 32


class Backlog:
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
