"""How a model's dtype is computed on this machine."""

from dataclasses import dataclass

import torch

from kernels.native import NativeKernels, native_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePath:
    # Goes into a replica's numerics fingerprint.
    name: str
    # Of the activations that go into linears and attention. The residual stream is float32 in any case.
    compute_dtype: torch.dtype
    # Of a KV cache that attention reads as it is.
    kv_cache_dtype: torch.dtype
    # None: PyTorch computes.
    native: NativeKernels | None = None


def compute_path(dtype: torch.dtype, head_size: int) -> ComputePath:
    """The path for a model of `dtype` (float32 or bfloat16) on this CPU.

    C++ kernels, if they can be had, compute on as many threads as torch is set to now. The first call may build them.
    """
    kernels = native_kernels() if head_size % 8 == 0 else None
    return torch_path(dtype) if kernels is None else native_path(dtype, kernels)


def native_path(dtype: torch.dtype, kernels: NativeKernels) -> ComputePath:
    kernels.set_threads(torch.get_num_threads())
    name = str(dtype).removeprefix("torch.")
    return ComputePath(
        name=f"cpu-{kernels.path.name}-{name}", compute_dtype=torch.float32, kv_cache_dtype=dtype, native=kernels
    )


def torch_path(dtype: torch.dtype) -> ComputePath:
    if dtype is torch.float32:
        return ComputePath(name="cpu-onednn-float32", compute_dtype=dtype, kv_cache_dtype=dtype)
    # torch's own bf16 check is content with AVX512BW, where oneDNN emulates.
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return ComputePath(name="cpu-onednn-bfloat16", compute_dtype=dtype, kv_cache_dtype=dtype)
    # Without bf16 instructions a bf16 GEMM is emulated, at a tenth of float32's speed (M = 64, 576x3072: 11.5 ms
    # against 1.4). Weights rounded to bf16 are therefore held, and multiplied, as float32; and KV is kept so, too, for
    # converting it in each step costs more than reading it.
    return ComputePath(
        name="cpu-onednn-bfloat16-as-float32", compute_dtype=torch.float32, kv_cache_dtype=torch.float32
    )
