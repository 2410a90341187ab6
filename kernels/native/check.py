"""The parts that the checks of C++ kernels share. A compiler, a virtual machine or a CPU can be wrong, and wrong logits
look like logits."""

import torch

from kernels.native.library import NativeKernels, NativeKernelsError


def compare(kernels: NativeKernels, what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    if not error < tolerance:
        raise wrong(kernels, f"{what} is off by {error:.1e} of its largest value, where {tolerance:.0e} is allowed")


def wrong(kernels: NativeKernels, what: str) -> NativeKernelsError:
    return NativeKernelsError(
        f"the {kernels.path.name} kernels give wrong results on this machine: {what}; another compiler (CXX=clang++) "
        "may help"
    )
