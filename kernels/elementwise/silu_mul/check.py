"""Checks the C++ kernel of `multiply_by_sigmoid_` against PyTorch, at load."""

import torch

from kernels.elementwise.silu_mul import multiply_by_sigmoid_
from kernels.native.check import compare
from kernels.native.library import NativeKernels


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming the error, if results differ."""
    generator = torch.Generator().manual_seed(0)
    x, gates = (torch.randn(7, 19, generator=generator) for _ in range(2))
    expected = x.double() * gates.double().sigmoid()
    multiply_by_sigmoid_(x, gates, kernels)
    compare(kernels, "a multiplication by gates", x, expected, 1e-6)
