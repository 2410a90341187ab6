"""temperature, top_k, top_p, min_p and seed: the distribution that a token is drawn from, and the random number.

kernels.sampling draws; it takes these parameters as columns, one entry per row.

Shape suffixes: R permanent rows, M new ones, L scored positions, N rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch

from kernels.native.library import NativeKernels
from kernels.sampling import draw_rows
from worker.device.staging import Part, StepSlot
from worker.sampling.features import RowSampling
from worker.sampling.uniforms import uniforms


class SamplingKind(Enum):
    """The sampling that a step's rows need on a GPU; a captured graph serves one kind. In order: each kind also serves
    rows of those before it, with the same tokens, but takes longer."""

    GREEDY = 0
    # A temperature.
    DRAWS = 1
    # A temperature, and top_k, top_p or min_p.
    FILTERS = 2

    @classmethod
    def of(cls, new: RowSampling) -> "SamplingKind":
        if not new.temperature > 0:
            return cls.GREEDY
        return cls.FILTERS if new.top_k > 0 or new.top_p < 1 or new.min_p > 0 else cls.DRAWS


class Filters:
    """The parameters of all rows, on a CPU."""

    def __init__(self, num_rows: int) -> None:
        self.temperature_R = np.zeros(num_rows, np.float32)
        self._top_k_R = np.zeros(num_rows, np.int64)
        self._top_p_R = np.ones(num_rows, np.float64)
        self._min_p_R = np.zeros(num_rows, np.float32)
        self._seed_R = np.zeros(num_rows, np.uint64)
        self._choice_R = np.zeros(num_rows, np.uint32)

    def add(self, new: RowSampling) -> None:
        row = new.row
        self.temperature_R[row] = new.temperature
        self._top_k_R[row] = new.top_k
        self._top_p_R[row] = new.top_p
        self._min_p_R[row] = new.min_p
        self._seed_R[row] = new.seed
        self._choice_R[row] = new.choice

    def uniforms(self, rows_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
        """Returns the random numbers of the draws at these output positions, float64 [N]."""
        return uniforms(self._seed_R[rows_N], self._choice_R[rows_N], positions_N)

    def draw(
        self,
        logits_LV: np.ndarray,
        scored_N: np.ndarray,
        rows_N: np.ndarray,
        uniform_N: np.ndarray,
        kernels: NativeKernels | None,
    ) -> np.ndarray:
        """Draws tokens of rows with a temperature above 0, see draw_rows. scored_N: indices of their logits in L.
        uniform_N: from `uniforms`."""
        return draw_rows(
            logits_LV,
            scored_N,
            temperature_N=self.temperature_R[rows_N],
            uniform_N=uniform_N,
            top_k_N=self._top_k_R[rows_N],
            top_p_N=self._top_p_R[rows_N],
            min_p_N=self._min_p_R[rows_N],
            kernels=kernels,
        )


class DeviceFilters:
    """The parameters of all rows, on a GPU."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        # Imported here: workers on a CPU save the half second that Triton's import takes.
        from kernels.sampling.triton import SamplingColumns, sample
        from kernels.step_inputs.triton import write_columns

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        self._sample, self._write_columns = sample, write_columns
        self._columns = SamplingColumns(
            temperature_R=column(torch.float32),
            top_k_R=column(torch.int32),
            top_p_R=column(torch.float64),
            min_p_R=column(torch.float32),
            seed_R=column(torch.int64),
            choice_R=column(torch.int32),
        )

    def add(self, new_rows: Sequence[RowSampling], slot: StepSlot) -> Sequence[Part]:
        """Stages the columns of new rows for `write`."""
        columns_M = (
            np.array([new.row for new in new_rows], np.int32),
            np.array([new.temperature for new in new_rows], np.float32),
            np.array([new.top_k for new in new_rows], np.int32),
            np.array([new.top_p for new in new_rows], np.float64),
            np.array([new.min_p for new in new_rows], np.float32),
            np.array([new.seed for new in new_rows], np.uint64).view(np.int64),
            np.array([new.choice for new in new_rows], np.uint32).view(np.int32),
        )
        return [slot.add(column_M) for column_M in columns_M]

    def write(self, staged: Sequence[Part]) -> None:
        rows_M, *columns_M = (part.tensor for part in staged)
        names = type(self._columns).__slots__
        self._write_columns(self._columns, rows_M, type(self._columns)(**dict(zip(names, columns_M, strict=True))))

    def apply(
        self,
        kind: SamplingKind,
        logits_LV: torch.Tensor,
        rows_L: torch.Tensor,
        positions_L: torch.Tensor,
        tokens_L: torch.Tensor,
    ) -> None:
        """Chooses tokens_L, see kernels.sampling.triton.sample. kind: one that serves all these rows."""
        self._sample(
            logits_LV,
            rows_L,
            positions_L,
            self._columns,
            tokens_L,
            draws=kind is not SamplingKind.GREEDY,
            filters=kind is SamplingKind.FILTERS,
        )
