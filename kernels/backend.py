"""The backend that computes a model: its kernels, device and dtypes, and this rank's share of the layers."""

from dataclasses import dataclass

import torch

from kernels.native.library import NativeKernels
from kernels.shard import ALL_LAYERS, NOT_SHARED, WHOLE, ExpertShard, Shard, Stage

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBackend:
    """The GPU path: Triton kernels, and torch's GEMMs where those are faster."""

    # A GPU, or the CPU where Triton interprets its kernels (TRITON_INTERPRET=1).
    device: torch.device
    # A row's result has the same bits in any batch, however its prompt is cut into chunks.
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    # Goes into a replica's numerics fingerprint.
    name: str
    # The dtype of activations that go into linears and attention. The residual stream is always float32.
    compute_dtype: torch.dtype
    # The dtype of a KV cache that attention reads without conversion.
    kv_cache_dtype: torch.dtype
    # C++ kernels for CPUs.
    native: NativeKernels | None = None
    # Triton kernels for a GPU. With neither, PyTorch computes on the CPU.
    gpu: GpuBackend | None = None
    # The part of each layer that this rank computes.
    shard: Shard = WHOLE
    # The layers that this rank computes.
    stage: Stage = ALL_LAYERS
    # The whole experts of each mixture that this rank computes. With size 1: the `shard` part of every expert.
    experts: ExpertShard = NOT_SHARED

    @property
    def device(self) -> torch.device:
        """The device of weights, KV cache and activations."""
        return _CPU if self.gpu is None else self.gpu.device


def native_backend(dtype: torch.dtype, kernels: NativeKernels, kv_cache_dtype: torch.dtype | None = None) -> Backend:
    """kv_cache_dtype: None means dtype."""
    kernels.set_threads(torch.get_num_threads())
    kv_cache_dtype = kv_cache_dtype or dtype
    return Backend(
        name=f"cpu-{kernels.path.name}-{'-'.join(_dtypes(dtype, kv_cache_dtype))}",
        compute_dtype=torch.float32,
        kv_cache_dtype=kv_cache_dtype,
        native=kernels,
    )


def torch_backend(dtype: torch.dtype) -> Backend:
    if dtype is torch.float32:
        return Backend(name="cpu-onednn-float32", compute_dtype=dtype, kv_cache_dtype=dtype)
    # torch's own bf16 check passes with AVX512BW alone, where oneDNN emulates bf16.
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return Backend(name="cpu-onednn-bfloat16", compute_dtype=dtype, kv_cache_dtype=dtype)
    # Without bf16 instructions a bf16 GEMM is emulated, at a tenth of float32's speed (M = 64, 576x3072: 11.5 ms
    # against 1.4). So weights rounded to bf16 are stored and multiplied as float32. KV is float32 too: converting it in
    # each step costs more than reading it.
    return Backend(name="cpu-onednn-bfloat16-as-float32", compute_dtype=torch.float32, kv_cache_dtype=torch.float32)


def gpu_backend(
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Backend:
    """The backend for a model of `dtype` (bfloat16, float16 or float32) on a GPU. kv_cache_dtype: None means dtype."""
    kv_cache_dtype = kv_cache_dtype or dtype
    parts = [_architecture(device), *_dtypes(dtype, kv_cache_dtype)]
    if batch_invariant:
        parts.append("invariant")
    return Backend(
        name=f"triton-{'-'.join(parts)}",
        compute_dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        gpu=GpuBackend(device=device, batch_invariant=batch_invariant),
    )


def _dtypes(dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> list[str]:
    names = [str(each).removeprefix("torch.") for each in (dtype, kv_cache_dtype)]
    return names[:1] if dtype is kv_cache_dtype else [names[0], f"kv-{names[1]}"]


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreted"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
