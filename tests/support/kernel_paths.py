"""The ways to compute that this machine has, for tests that hold all of them to one promise."""

import pytest
import torch

from kernels.compute_path import ComputePath, native_path, torch_path
from kernels.native import NativeKernels, native_kernels


def native() -> NativeKernels:
    """The C++ kernels of this machine; skips the test if it has none."""
    kernels = native_kernels()
    if kernels is None:
        pytest.skip("no C++ kernels on this machine: no compiler, or a CPU without AVX2")
    return kernels


def path_of(kind: str, dtype: torch.dtype) -> ComputePath:
    """kind: native or torch."""
    return native_path(dtype, native()) if kind == "native" else torch_path(dtype)
