"""Embeddings of items that steps have encoded, kept until the scheduler drops them.

Shape suffixes: N rows of the cache, M embeddings, E hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch

from worker.errors import PlanError


class EncoderCache:
    """One block of memory. An item's embeddings lie in any free rows of it, so there is no fragmentation."""

    def __init__(self, size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserves the memory; on a CPU, most systems commit a page only when it is first written."""
        self.size = size
        self._rows_NE = torch.empty(size, hidden_size, dtype=dtype, device=device)
        # The last of them are given out first.
        self._free = np.arange(size)[::-1].copy()
        self._num_free = size
        self._held: dict[int, np.ndarray] = {}

    @staticmethod
    def num_bytes(size: int, hidden_size: int, dtype: torch.dtype) -> int:
        return size * hidden_size * dtype.itemsize

    @property
    def num_embeddings(self) -> int:
        """Embeddings that it holds."""
        return self.size - self._num_free

    def __contains__(self, item: int) -> bool:
        return item in self._held

    def put(self, item: int, embeddings_ME: torch.Tensor) -> None:
        """Keeps an item's embeddings. Raises PlanError if there is no room."""
        count = len(embeddings_ME)
        if count > self._num_free:
            raise PlanError(
                f"encoded_items: item {item} has {count} embeddings, and {self._num_free} of encoder_cache_size="
                f"{self.size} are free"
            )
        rows_M = self._free[self._num_free - count : self._num_free].copy()
        self._num_free -= count
        self._held[item] = rows_M
        self._rows_NE[self._index(rows_M)] = embeddings_ME.to(self._rows_NE.dtype)

    def drop(self, item: int) -> None:
        """Forgets an item's embeddings. Raises PlanError if there are none."""
        rows_M = self._held.pop(item, None)
        if rows_M is None:
            raise PlanError(f"dropped_items: the cache has no embeddings of item {item}")
        self._free[self._num_free : self._num_free + len(rows_M)] = rows_M
        self._num_free += len(rows_M)

    def clear(self) -> None:
        for item in [*self._held]:
            self.drop(item)

    def take(self, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Returns embeddings [M, E]: of each (item, first, end), those from `first` to end - 1. Raises PlanError if
        they are not there."""
        rows: list[np.ndarray] = []
        for item, first, end in parts:
            rows_M = self._held.get(item)
            if rows_M is None:
                raise PlanError(f"rows: the step computes tokens of item {item}, which no plan has encoded")
            if end > len(rows_M):
                raise PlanError(f"rows: item {item} has {len(rows_M)} embeddings, and tokens for {end}")
            rows.append(rows_M[first:end])
        return self._rows_NE[self._index(np.concatenate(rows))]

    def _index(self, rows_M: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows_M).to(self._rows_NE.device, non_blocking=True)
