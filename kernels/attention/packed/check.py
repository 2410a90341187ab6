"""Checks C++ attention over packed sequences against the reference, at load."""

import torch

from kernels.attention.packed import PackedAttention
from kernels.attention.packed.reference import packed_attention
from kernels.backend import native_backend
from kernels.native.check import compare
from kernels.native.library import NativeKernels


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming the error, if results differ. Sequences of one token, of less than a chunk of
    keys, and of more than a tile of queries; heads that fill no vector."""
    generator = torch.Generator().manual_seed(0)
    starts, num_heads, head_size = (0, 1, 31, 161), 2, 20
    qkv_T3HD = torch.randn(starts[-1], 3, num_heads, head_size, generator=generator)
    q_THD, k_THD, v_THD = qkv_T3HD.unbind(1)
    expected = packed_attention(q_THD, k_THD, v_THD, starts, 0.3)
    attention = PackedAttention(starts, native_backend(torch.float32, kernels))
    compare(kernels, "attention over packed sequences", attention(q_THD, k_THD, v_THD, 0.3), expected, 1e-5)
