"""Attention over packed sequences, sequence by sequence."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def packed_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, starts: Sequence[int], scale: float
) -> torch.Tensor:
    """In float64."""
    parts = []
    for first, end in pairwise(starts):
        q_HTD, k_HTD, v_HTD = (x[first:end].double().transpose(0, 1) for x in (q_THD, k_THD, v_THD))
        parts.append(((scale * q_HTD @ k_HTD.mT).softmax(dim=-1) @ v_HTD).transpose(0, 1))
    return torch.cat(parts)
