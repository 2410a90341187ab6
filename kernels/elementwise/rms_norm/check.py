"""Checks the C++ kernel of `add_rms_norm_` against the reference, at load."""

import torch

from kernels.elementwise.rms_norm import add_rms_norm_
from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.native.check import compare
from kernels.native.library import NativeKernels

_EPS = 1e-5


def check(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming the error, if results differ."""
    generator = torch.Generator().manual_seed(0)
    x, added, weight = (torch.randn(shape, generator=generator) for shape in ((19, 70), (19, 70), (70,)))
    expected = added + rms_norm(x, weight, _EPS)
    add_rms_norm_(added, x, weight, _EPS, kernels)
    compare(kernels, "norm added to something", added, expected, 1e-5)
