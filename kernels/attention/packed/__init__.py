"""Attention without a mask over packed sequences: each token sees all tokens of its own sequence, as in vision towers,
and there is no cache.

Legend: T tokens, S sequences, H heads, D head size.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kernels.attention.packed.native import NativePackedPlan
from kernels.attention.packed.torch_cpu import TorchPackedPlan
from kernels.backend import Backend


class PackedPlan(Protocol):
    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float, out_THD: torch.Tensor
    ) -> torch.Tensor: ...


class PackedAttention:
    """The plan of some sequences, for any number of layers. A token's result depends on its sequence alone."""

    def __init__(self, starts: Sequence[int], backend: Backend) -> None:
        """starts: ascending, [S + 1]: sequence i has the tokens starts[i] : starts[i + 1], at least one each. Raises
        ValueError."""
        numbers = np.asarray(starts, np.int32)
        if numbers.ndim != 1 or len(numbers) < 1 or numbers[0] != 0 or (np.diff(numbers) < 1).any():
            raise ValueError(f"starts={list(starts)[:8]} must begin with 0 and rise")
        self.num_tokens = int(numbers[-1])
        self._plan: PackedPlan
        if backend.gpu is not None:
            from kernels.attention.packed.triton import TritonPackedPlan  # imports Triton

            self._plan = TritonPackedPlan(numbers, backend.device)
        elif backend.native is not None:
            self._plan = NativePackedPlan(numbers, backend.native)
        else:
            self._plan = TorchPackedPlan(numbers)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        scale: float,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns softmax(scale * q k^T) v of each head, [T, H, D] in q's dtype; softmax and sums are float32.

        q_THD, k_THD, v_THD: the backend's compute_dtype, with stride D between heads, 1 in the last dim, and any one
        between tokens (columns of a projection). out: contiguous memory for the result. Raises ValueError for tensors
        that do not fit together.
        """
        for name, x_THD in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
            if x_THD.shape != q_THD.shape or x_THD.dtype is not q_THD.dtype or len(x_THD) != self.num_tokens:
                raise ValueError(
                    f"{name} has shape {tuple(x_THD.shape)} and dtype {x_THD.dtype}: {self.num_tokens} tokens are "
                    f"expected, and the shape and dtype of q, {tuple(q_THD.shape)}, {q_THD.dtype}"
                )
            if x_THD.stride()[1:] != (x_THD.shape[2], 1):
                raise ValueError(f"{name} has strides {x_THD.stride()}: heads must be side by side")
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out is None else out
        if not self.num_tokens:
            return out_THD
        return self._plan.attend(q_THD, k_THD, v_THD, scale, out_THD)


__all__ = ["PackedAttention"]
