"""All kernel paths of CPUs, for tests that must hold for each of them."""

import os
import shutil
from functools import lru_cache

import pytest
import torch

from kernels.backend import Backend, native_backend, torch_backend
from kernels.cpu_backend import native_kernels
from kernels.native.build import PATHS, build, flags_of_this_cpu, path_of_this_cpu
from kernels.native.library import NativeKernels
from tests.support.kernels.emulation import emulated

# Names of all sets of C++ kernels; those for instructions that this machine lacks are emulated.
NATIVE_KINDS = tuple(path.name for path in PATHS)
KINDS = (*NATIVE_KINDS, "torch")


def native() -> NativeKernels:
    """The C++ kernels of this machine; skips the test if it has none."""
    _skip_without_compiler()
    if path_of_this_cpu() is None:
        pytest.skip("a CPU without AVX2")
    kernels = native_kernels()
    # Kernels that no longer compile are a failure; otherwise every test of them would be skipped silently.
    assert kernels is not None, "there is a compiler, but the kernels did not build"
    return kernels


@lru_cache
def kernels_of(kind: str) -> NativeKernels:
    """kind: native (this machine's own) or one of NATIVE_KINDS. Skips the test if these kernels can't run here."""
    if kind == "native":
        return native()
    path, flags = next(path for path in PATHS if path.name == kind), flags_of_this_cpu()
    if not path.cpu_flags <= flags:
        path = emulated(path)
    if not path.cpu_flags <= flags:
        pytest.skip("a CPU without AVX2")
    _skip_without_compiler()
    return NativeKernels(path, build(path))


def _skip_without_compiler() -> None:
    if not any(name and shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")


def path_of(kind: str, dtype: torch.dtype) -> Backend:
    """kind: torch, or as for `kernels_of`. dtype: also float8_e4m3fn, for the KV cache of a model in bfloat16."""
    if kind == "torch":
        return torch_backend(dtype)
    if dtype is torch.float8_e4m3fn:
        return native_backend(torch.bfloat16, kernels_of(kind), dtype)
    return native_backend(dtype, kernels_of(kind))
