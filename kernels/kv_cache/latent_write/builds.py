"""Ahead-of-time builds of MLA's cache write: DeepSeek's sizes in each cache dtype."""

import torch

from kernels.kv_cache.latent_write.triton import mla_cache_write
from kernels.kv_cache.layout import LatentShape, mla_cache_shape
from kernels.triton_common.kernel_build import ARCHS, FP8_ARCHS, KernelBuild
from kernels.triton_common.recording import bf16, float32, recorded, tensor


def shipped() -> list[KernelBuild]:
    return [
        _build("bf16", torch.bfloat16, None),
        _build("e4m3", torch.float8_e4m3fn, float32(1), FP8_ARCHS),
        _build("e4m3-bits", torch.float8_e4m3fn, float32(1), (80,)),
    ]


def _build(name: str, dtype: torch.dtype, kv_scale: torch.Tensor | None, archs: tuple[int, ...] = ARCHS) -> KernelBuild:
    shape = LatentShape(num_heads=128)
    cache = tensor(dtype, *mla_cache_shape(num_blocks=64, block_size=16, shape=shape))
    latent, rope = bf16(8, shape.latent_size), bf16(8, shape.rope_size)
    return recorded(
        name,
        lambda: mla_cache_write(latent, rope, cache, tensor(torch.int64, 8), kv_scale=kv_scale),
        archs=archs,
        expects_vectors=True,
    )
