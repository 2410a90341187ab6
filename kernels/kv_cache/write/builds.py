"""Ahead-of-time builds of the fused cache write: Llama in bf16, Qwen3 with head norms and an e4m3 cache, GPT-J's pairs
in part of a head."""

import torch

from kernels.kv_cache.layout import gpu_cache_shape
from kernels.kv_cache.write.triton import HeadNorms, rope_cache_write
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, float32, recorded, tensor


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", num_heads=32),
        _build("norms-e4m3", num_heads=16, is_e4m3=True, archs=FP8_ARCHS),
        _build("norms-e4m3-bits", num_heads=16, is_e4m3=True, archs=(80,)),
        _build("interleaved-part", num_heads=16, rotary_dims=64, interleaved=True),
    ]


def _build(
    name: str,
    *,
    num_heads: int,
    rotary_dims: int = 128,
    interleaved: bool = False,
    is_e4m3: bool = False,
    archs: tuple[int, ...] = ARCHS,
) -> KernelBuild:
    """Builds with is_e4m3 also have head norms, and a scale per KV head."""
    shape = gpu_cache_shape(num_blocks=64, block_size=16, num_kv_heads=8, head_size=128)
    cache = tensor(torch.float8_e4m3fn, *shape) if is_e4m3 else bf16(*shape)
    norms = HeadNorms(bf16(128), bf16(128), 1e-6) if is_e4m3 else None
    scale = float32(8) if is_e4m3 else None
    return recorded(
        name,
        lambda: rope_cache_write(
            bf16(8, (num_heads + 16) * 128),
            float32(8, rotary_dims),
            cache,
            tensor(torch.int64, 8),
            num_heads=num_heads,
            head_norms=norms,
            interleaved=interleaved,
            k_scale=scale,
            v_scale=scale,
        ),
        archs=archs,
        expects_vectors=True,
    )
