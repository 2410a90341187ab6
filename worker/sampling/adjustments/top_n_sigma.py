"""top_n_sigma: keeps only tokens whose logit is within n standard deviations of the largest (arXiv 2411.07641).

As in llama.cpp, the deviation is over all logits that are not -inf, after penalties and bans, before temperature. It
depends on the position's logits alone. Greedy rows ignore it: it would not change their token.

Shape suffixes: V vocabulary, A adjusted positions, S some of them.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from worker.device.staging import Part, StepSlot
from worker.sampling.feature import Adjustment, NewRow, Positions, Staged, Table

# Positions whose float64 logits exist at once: 16 x 128,256 take 16 MiB.
_SLICE = 16


class TopNSigma(Adjustment):
    fields = ("top_n_sigma",)

    def __init__(self, n: float) -> None:
        self.n = n

    @classmethod
    def add(cls, new: NewRow) -> Self | None:
        n = new.sampling.top_n_sigma
        return cls(n) if n > 0 and new.temperature > 0 else None

    def apply(self, logits_V: np.ndarray) -> None:
        wide_V = logits_V.astype(np.float64)
        there_N = wide_V[wide_V > -np.inf]
        if len(there_N):
            logits_V[wide_V < there_N.max() - self.n * there_N.std()] = -np.inf


class TopNSigmaTable(Table[TopNSigma]):
    """Keeps each row's n on the host and sends it with each position; nothing is kept on the device."""

    def __init__(self, device: torch.device, *, num_rows: int, **sizes: Any) -> None:
        super().__init__(device, num_rows=num_rows, **sizes)
        self._n_R = np.zeros(num_rows, np.float64)

    def stage_rows(self, new: Sequence[tuple[int, TopNSigma]], slot: StepSlot) -> Sequence[Part]:
        for row, each in new:
            self._n_R[row] = each.n
        return ()

    def write(self, staged: Staged) -> None:
        return

    def stage(self, at: Positions, slot: StepSlot) -> Sequence[Part]:
        indices = np.flatnonzero(self.needed(at.rows_A, at.positions_A))
        return (slot.add(indices), slot.add(self._n_R[at.rows_A[indices]])) if len(indices) else ()

    def apply(self, logits_AV: torch.Tensor, positions_A: torch.Tensor, staged: Sequence[Part]) -> None:
        for indices_S, n_S in zip(*(part.tensor.split(_SLICE) for part in staged), strict=True):
            logits_AV.index_copy_(0, indices_S, _without_the_rest(logits_AV[indices_S], n_S[:, None]))


def _without_the_rest(logits_SV: torch.Tensor, n_S1: torch.Tensor) -> torch.Tensor:
    """Sets logits below the limit to -inf. Rows with a NaN or +inf stay as they are: their deviation is NaN."""
    absent_SV = logits_SV == -torch.inf
    counts_S1 = logits_SV.shape[1] - absent_SV.sum(1, keepdim=True)
    wide_SV = logits_SV.double()
    means_S1 = _sums(wide_SV.masked_fill(absent_SV, 0)) / counts_S1
    variances_S1 = _sums((wide_SV - means_S1).square_().masked_fill_(absent_SV, 0)) / counts_S1
    least_S1 = wide_SV.amax(1, keepdim=True) - n_S1 * variances_S1.sqrt()
    return logits_SV.masked_fill(wide_SV < least_S1, -torch.inf)


def _sums(lines_SV: torch.Tensor) -> torch.Tensor:
    """Sums each row, [S, 1], by halves: in torch's reductions the order of additions may depend on the number of
    rows."""
    while (width := lines_SV.shape[1]) > 1:
        half = width // 2
        halves = lines_SV[:, :half] + lines_SV[:, half : 2 * half]
        if width % 2:
            halves[:, 0] += lines_SV[:, -1]
        lines_SV = halves
    return lines_SV
