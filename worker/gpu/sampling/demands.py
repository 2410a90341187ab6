"""What rows demand of sampling, as the host knows it.

Shape suffixes: R permanent rows, N sampling rows.
"""

from enum import Enum

import numpy as np

from worker.gpu.step_inputs import RowSampling


class SamplingKind(Enum):
    """What a step's rows demand of the kernels; a captured graph serves one kind. In order: each serves those before
    it, with the same tokens, and takes longer."""

    GREEDY = 0
    # Temperatures.
    DRAWS = 1
    # And top_k, top_p or min_p.
    FILTERS = 2


class Demands:
    """Of all rows. Those of free rows mean nothing."""

    def __init__(self, num_rows: int) -> None:
        self._kind_R = np.zeros(num_rows, np.int8)
        # -1: none.
        self.num_logprobs_R = np.full(num_rows, -1, np.int32)
        # Rows that are more than greedy, and rows with logprobs: in many steps there are none.
        self._drawing_rows: set[int] = set()
        self._asking_rows: set[int] = set()

    def free(self, row: int) -> None:
        self._drawing_rows.discard(row)
        self._asking_rows.discard(row)

    def take(self, new: RowSampling) -> None:
        """A row that is free."""
        kind = SamplingKind.GREEDY
        if new.temperature > 0:
            filters = new.top_k > 0 or new.top_p < 1 or new.min_p > 0
            kind = SamplingKind.FILTERS if filters else SamplingKind.DRAWS
            self._drawing_rows.add(new.row)
        self._kind_R[new.row] = kind.value
        self.num_logprobs_R[new.row] = -1 if new.num_logprobs is None else new.num_logprobs
        if new.num_logprobs is not None:
            self._asking_rows.add(new.row)

    def kind(self, rows_N: np.ndarray) -> SamplingKind:
        """The least that serves all these rows."""
        return SamplingKind(self._kind_R[rows_N].max(initial=0)) if self._drawing_rows else SamplingKind.GREEDY

    def asking(self, rows_L: np.ndarray) -> np.ndarray:
        """Indices of rows that want logprobs."""
        return np.flatnonzero(self.num_logprobs_R[rows_L] >= 0) if self._asking_rows else rows_L[:0].astype(np.int64)
