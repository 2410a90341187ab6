"""Kernels in C++ for the CPU at hand: built by the system's compiler when they are first needed, and kept.

`native_kernels` gives them, or None where they cannot be had; the ops of kernels/ then compute with PyTorch.
"""

from kernels.native.library import NativeKernels, NativeKernelsError
from kernels.native.load import native_kernels

__all__ = ["NativeKernels", "NativeKernelsError", "native_kernels"]
