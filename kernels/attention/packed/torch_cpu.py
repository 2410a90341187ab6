"""Attention over packed sequences in PyTorch on a CPU.

Legend: T tokens, H heads, D head size, Q queries of a tile.
"""

from itertools import pairwise

import numpy as np
import torch

# Scores per tile: at most 16 MiB of float32.
_SCORES_PER_TILE = 4 << 20


class TorchPackedPlan:
    def __init__(self, starts: np.ndarray) -> None:
        """starts: int32 [S + 1]."""
        self._sequences = list(pairwise(starts.tolist()))

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float, out_THD: torch.Tensor
    ) -> torch.Tensor:
        """See PackedAttention."""
        for first, end in self._sequences:
            k_HDT = k_THD[first:end].float().permute(1, 2, 0)
            v_HTD = v_THD[first:end].float().transpose(0, 1)
            step = max(1, _SCORES_PER_TILE // ((end - first) * q_THD.shape[1]))
            for start in range(first, end, step):
                tile = slice(start, min(start + step, end))
                scores_HQT = torch.matmul(q_THD[tile].float().transpose(0, 1) * scale, k_HDT)
                out_THD[tile] = torch.matmul(scores_HQT.softmax(dim=-1), v_HTD).transpose(0, 1)
        return out_THD
