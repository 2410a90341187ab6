"""Chooses the backend of this CPU: C++ kernels if they build, load and agree with the references; else PyTorch.

Each op has its check beside it, in check.py. Together the checks take a few milliseconds, once per process.
"""

import logging
from functools import lru_cache

import torch

from kernels.attention.latent.check import check as check_latent_attention
from kernels.attention.packed.check import check as check_packed_attention
from kernels.attention.paged.check import check as check_attention
from kernels.attention.recurrent.check import check as check_recurrences
from kernels.backend import Backend, native_backend, torch_backend
from kernels.elementwise.rms_norm.check import check as check_rms_norm
from kernels.elementwise.silu_mul.check import check as check_gates
from kernels.linear.check import check as check_linear
from kernels.native.build import BuildError, build, path_of_this_cpu
from kernels.native.library import NativeKernels
from kernels.sampling.check import check as check_draws

_CHECKS = (
    check_linear,
    check_attention,
    check_latent_attention,
    check_packed_attention,
    check_recurrences,
    check_rms_norm,
    check_gates,
    check_draws,
)


def check_kernels(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming op, dtype and error, if a kernel disagrees with its reference."""
    with torch.inference_mode():
        for check in _CHECKS:
            check(kernels)


_log = logging.getLogger("octavo.kernels")


@lru_cache(maxsize=1)
def native_kernels() -> NativeKernels | None:
    """Returns this CPU's kernels; if there are none, warns, saying why, and returns None.

    The first call may build them, which takes seconds. Raises NativeKernelsError if their results are wrong.
    """
    path = path_of_this_cpu()
    if path is None:
        _log.warning("this CPU has no AVX2, which the C++ kernels need: computing with PyTorch, several times slower")
        return None
    try:
        kernels = NativeKernels(path, build(path))
    except (BuildError, OSError) as error:
        _log.warning("computing with PyTorch, several times slower than with the C++ kernels: %s", error)
        return None
    check_kernels(kernels)
    return kernels


def cpu_backend(dtype: torch.dtype, head_size: int, kv_cache_dtype: torch.dtype | None = None) -> Backend:
    """The backend for a model of `dtype` (float32 or bfloat16) on this CPU. kv_cache_dtype: e4m3, or None for dtype.

    C++ kernels, where available, run on as many threads as torch is set to now. The first call may build them. Raises
    ValueError if there are none for an e4m3 cache.
    """
    kernels = native_kernels() if head_size % 8 == 0 else None
    if kernels is not None:
        return native_backend(dtype, kernels, kv_cache_dtype)
    if kv_cache_dtype is not None:
        raise ValueError("kv_cache_dtype=fp8 needs the C++ kernels, and heads of a multiple of 8: use auto")
    return torch_backend(dtype)
