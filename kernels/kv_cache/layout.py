"""The shapes of attention, and the layout of keys and values in a GPU's KV cache: one layer is one contiguous
tensor.

    cache[block, 0 | 1, kv_head, offset, :]    key | value, [N, 2, K, B, D]
    cache[block, offset, :]                    of MLA: latent | key part rotated by rope, [N, B, L + R]

    N blocks, K KV heads, B tokens of a block, D head size, L latent size, R rope size; slot = block * B + offset

A program reads one KV head of many blocks, so the tokens of one head are adjacent: a block of 16 tokens with head size
128 in bf16 has 4 contiguous KiB of keys and as much of values, whole cache lines whatever K is. Token-major order
([N, B, 2, K, D], as in the CPU's PyTorch backend) would give each program 256 bytes of every K * 512. A whole block,
the unit of swaps, is contiguous, too. Head sizes are not padded.

MLA's heads all read the same entry of a token: the whole entry is their key, its latent their value. An entry is
contiguous, 1,152 bytes for DeepSeek's 512 + 64 in bf16; a program loads it into shared memory once and multiplies it
twice.

The dtype is bf16, fp16, fp32 or e4m3 (`torch.float8_e4m3fn`). With e4m3, number = scale * stored; scales are float32 on
the GPU, each [1] (per tensor) or [K] (per head).

Padding tokens have slot -1: nothing is written for them. Block 0 is the null block, never allocated.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.triton_common.device import arch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """`num_heads` query heads share `num_kv_heads` heads of keys and values, all of size `head_size`."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """`num_heads` query heads share one latent per token, which is both key and value, and one key part under rope."""

    num_heads: int
    latent_size: int = 512
    rope_size: int = 64

    @property
    def entry_size(self) -> int:
        """Numbers per token in the cache, and per query."""
        return self.latent_size + self.rope_size

    def check_for_gpus(self) -> None:
        """Raises ValueError for sizes that the Triton kernels don't support."""
        for name, size, least in (("latent", self.latent_size, 64), ("rope", self.rope_size, 16)):
            if size < least or size & (size - 1):
                raise ValueError(f"{name} size {size}: powers of two from {least} on work")
        if self.latent_size > 512 or self.rope_size > 64:
            raise ValueError(
                f"latent size {self.latent_size} and rope size {self.rope_size}: 512 and 64 are the most that fit into "
                "registers and shared memory"
            )


class KVScales(NamedTuple):
    """One layer's scales: number = scale * stored. float32 [1], or [K] for one per KV head, on the cache's device."""

    k: torch.Tensor
    v: torch.Tensor


# CacheType of kernels/kv_cache/cache_layout.h, for C++ kernels.
CPU_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
BLOCK_SIZES = (8, 16, 32, 64, 128)
HEAD_SIZES = (64, 80, 96, 128, 192, 256)


def gpu_cache_shape(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int]:
    """The shape of one layer, [N, 2, K, B, D]."""
    return num_blocks, 2, num_kv_heads, block_size, head_size


def check_gpu_cache(cache: torch.Tensor) -> None:
    """Raises ValueError if `cache` is not one layer in this layout."""
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(f"a GPU's KV cache is [num_blocks, 2, kv_heads, block_size, head_size], not {[*cache.shape]}")
    if not cache.is_contiguous():
        raise ValueError(f"a GPU's KV cache is contiguous, not of strides {cache.stride()}")
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype {cache.dtype} is none of {', '.join(map(str, CACHE_DTYPES))}")
    if cache.shape[3] not in BLOCK_SIZES:
        raise ValueError(f"block_size {cache.shape[3]} is none of {', '.join(map(str, BLOCK_SIZES))}")
    if cache.shape[4] not in HEAD_SIZES:
        raise ValueError(f"head size {cache.shape[4]} is none of {', '.join(map(str, HEAD_SIZES))}")


def kernel_view(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: before sm_89, which has no e4m3 type, e4m3 is viewed as its bits, uint8
    (`kernels.triton_common.numbers` converts them)."""
    if cache.dtype is torch.float8_e4m3fn and (arch_of(cache.device) or 90) < 89:
        return cache.view(torch.uint8)
    return cache


def pair_view(cache: torch.Tensor) -> torch.Tensor:
    """A cache of e4m3 as pairs along the last dimension, uint16: the even column is in the low byte."""
    return cache.view(torch.uint16)


def mla_cache_shape(*, num_blocks: int, block_size: int, shape: LatentShape) -> tuple[int, int, int]:
    """The shape of one layer, [N, B, L + R]."""
    return num_blocks, block_size, shape.entry_size


def check_mla_cache(cache: torch.Tensor, entry_size: int) -> None:
    """Raises ValueError if `cache` is not one layer in this layout, of entry_size = L + R."""
    if cache.dim() != 3 or cache.shape[2] != entry_size:
        raise ValueError(f"a cache of MLA is [num_blocks, block_size, {entry_size}], not {[*cache.shape]}")
    if not cache.is_contiguous():
        raise ValueError(f"a cache of MLA is contiguous, not of strides {cache.stride()}")
    if cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype {cache.dtype} is none of {', '.join(map(str, CACHE_DTYPES))}")
    if cache.shape[1] not in BLOCK_SIZES:
        raise ValueError(f"block_size {cache.shape[1]} is none of {', '.join(map(str, BLOCK_SIZES))}")


def check_mla_scale(cache: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raises ValueError unless an e4m3 cache has a scale, float32 [1], and any other cache has none."""
    if cache.dtype is not torch.float8_e4m3fn:
        if scale is not None:
            raise ValueError(f"kv_scale is for a cache of float8_e4m3fn; kv_cache_dtype is {cache.dtype}")
    elif scale is None:
        raise ValueError("kv_scale is None; a cache of float8_e4m3fn needs it (one, if nothing better is known)")
    elif scale.dtype is not torch.float32 or tuple(scale.shape) != (1,):
        raise ValueError(f"kv_scale is {scale.dtype} {tuple(scale.shape)}; float32 (1,) is expected")
