"""How a GPU's cache of MLA lies in memory: one layer is one contiguous tensor.

    cache[block, offset, :]    latent | rope, [N, B, L + R]

    N blocks, B tokens of a block, L latent size, R rope size; slot = block * B + offset

All heads read the same entry of a token, of which the whole is their key, and the latent their value. So there is no
head to sort by and no value beside the key: an entry is one piece, 1,152 bytes for DeepSeek's 512 + 64 in bf16, nine
whole lines of 128 bytes, which a program brings into shared memory once and multiplies twice. A block is one piece as
well, which is what block copies and swaps move.

The dtype is bf16, fp16, fp32 or e4m3 (`torch.float8_e4m3fn`). With e4m3 there is one float32 scale, [1], on the GPU,
for latent and rope alike: number = scale * stored.

Tokens that are padding have slot -1: nothing is written for them. Block 0 is the null block, never given out.
"""

import torch

from kernels.mla_attention.shape import LatentShape
from kernels.paged_attention.gpu_cache import BLOCK_SIZES, CACHE_DTYPES


def mla_cache_shape(*, num_blocks: int, block_size: int, shape: LatentShape) -> tuple[int, int, int]:
    """Of one layer, [N, B, L + R]."""
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
    """Raises ValueError unless an e4m3 cache has a scale, float32 [1], and another has none."""
    if cache.dtype is not torch.float8_e4m3fn:
        if scale is not None:
            raise ValueError(f"kv_scale is for a cache of float8_e4m3fn; kv_cache_dtype is {cache.dtype}")
    elif scale is None:
        raise ValueError("kv_scale is None; a cache of float8_e4m3fn needs it (one, if nothing better is known)")
    elif scale.dtype is not torch.float32 or tuple(scale.shape) != (1,):
        raise ValueError(f"kv_scale is {scale.dtype} {tuple(scale.shape)}; float32 (1,) is expected")
