"""Attention over packed sequences by the C++ kernel, packed_attention.h beside this file."""

import numpy as np
import torch

from kernels.native.library import NativeKernels


class NativePackedPlan:
    def __init__(self, starts: np.ndarray, kernels: NativeKernels) -> None:
        """starts: int32 [S + 1]."""
        self._starts, self._kernels = np.ascontiguousarray(starts), kernels

    def attend(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, scale: float, out_THD: torch.Tensor
    ) -> torch.Tensor:
        """See PackedAttention. All tensors are float32."""
        assert q_THD.dtype is torch.float32
        assert q_THD.stride() == k_THD.stride() == v_THD.stride()
        assert out_THD.shape == q_THD.shape
        assert out_THD.is_contiguous()
        _, num_heads, head_size = q_THD.shape
        self._kernels.packed_attention(
            self._starts.ctypes.data,
            len(self._starts) - 1,
            q_THD.data_ptr(),
            k_THD.data_ptr(),
            v_THD.data_ptr(),
            q_THD.stride(0),
            num_heads,
            head_size,
            scale,
            out_THD.data_ptr(),
        )
        return out_THD
