"""Draws drafts as the rows themselves would draw their tokens.

Shape suffixes: D drafting rows, W rows that draw at random, V the model's vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from kernels.native.library import NativeKernels
from kernels.sampling import greedy
from worker.step.rows import Rows


def drawn(
    rows: Rows,
    rows_D: np.ndarray,
    drafts: Sequence[Sequence[int]],
    logits_DV: np.ndarray,
    kernels: NativeKernels | None,
) -> np.ndarray:
    """Returns what each row would draw behind its drafts if the model had these logits, int64; -1: no token is left.

    drafts: those of each row so far. logits_DV: float32, without NaN; -inf for tokens that can't be drafted; changed in
    place.
    """
    sampling = rows.sampling
    for index in np.flatnonzero(sampling.adjusts_R[rows_D]).tolist():
        sampling.adjust_behind(int(rows_D[index]), drafts[index], logits_DV[index])
    token_ids_D, largest_D = greedy(logits_DV)
    token_ids_D = np.where(np.isfinite(largest_D), token_ids_D, -1)
    drawing = np.flatnonzero((sampling.filters.temperature_R[rows_D] > 0) & (token_ids_D >= 0))
    if len(drawing):
        rows_W = rows_D[drawing]
        positions_W = rows.output_positions(rows_W) + [len(drafts[index]) for index in drawing.tolist()]
        uniform_W = sampling.filters.uniforms(rows_W, positions_W)
        token_ids_D[drawing] = sampling.filters.draw(logits_DV, drawing, rows_W, uniform_W, kernels)
    return token_ids_D
