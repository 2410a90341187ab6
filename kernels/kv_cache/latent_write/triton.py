"""MLA's cache write on a GPU, quantizing if the cache is FP8. Layout: kernels/kv_cache/layout.py.

Legend: T tokens, N blocks, B tokens of a block, L latent size, R rope size, E = L + R.
"""

import torch
import triton.language as tl

from kernels.kv_cache.layout import check_mla_cache, check_mla_scale, kernel_view
from kernels.kv_cache.write.triton import to_cache
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import widen

# One program per token: with 2 warps, a thread has at least an 8-byte vector of bf16.
_NUM_WARPS = 2


def mla_cache_write(
    latent_TL: torch.Tensor,
    rope_TR: torch.Tensor,
    cache_NBE: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """Writes token t's normed latent and its key part, rotated by rope, to slot slots_T[t] = block * B + offset,
    rounded to the cache's dtype. A negative slot (padding) writes nothing.

    latent_TL, rope_TR: fp32, bf16 or fp16; sizes are powers of two; tokens may have any stride (slices of a
    projection). slots_T: int32 or int64; slots from 0 on are all different. It may be shorter than T: the other tokens
    are not written. kv_scale: float32 [1] on the device, for an e4m3 cache, which stores number / scale, saturated at
    448.

    Raises ValueError for a cache in another layout, shapes that differ, an e4m3 cache without a scale, and a scale for
    a cache of another dtype.
    """
    latent_size, rope_size = latent_TL.shape[1], rope_TR.shape[1]
    check_mla_cache(cache_NBE, latent_size + rope_size)
    check_mla_scale(cache_NBE, kv_scale)
    for name, x in (("latent", latent_TL), ("rope", rope_TR)):
        size = x.shape[1]
        if len(x) < len(slots_T) or x.stride(1) != 1 or size & (size - 1):
            raise ValueError(
                f"{name} of shape {tuple(x.shape)}, strides {x.stride()}: expected at least {len(slots_T)} tokens, the "
                "number of slots, each a contiguous power of two of numbers"
            )
    if len(slots_T):
        _mla_cache_write_kernel[(len(slots_T),)](
            latent_TL,
            rope_TR,
            kernel_view(cache_NBE),
            slots_T,
            kv_scale,
            latent_TL.stride(0),
            rope_TR.stride(0),
            LATENT=latent_size,
            ROPE=rope_size,
            num_warps=_NUM_WARPS,
        )


@jit
def _mla_cache_write_kernel(
    latent_TL,
    rope_TR,
    cache_NBE,
    slots_T,
    kv_scale,
    latent_stride,
    rope_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    latent_number, rope_number = tl.arange(0, LATENT), tl.arange(0, ROPE)
    latent = widen(tl.load(latent_TL + token * latent_stride + latent_number))
    rope = widen(tl.load(rope_TR + token * rope_stride + rope_number))
    # Slots are counted over all blocks, so this kernel needs no block size. A tensor of one number, not a scalar: when
    # the interpreter broadcasts a scalar's comparison, it becomes an integer.
    slot = tl.load(slots_T + token + tl.arange(0, 1)).to(tl.int64)
    scale = tl.full((1,), 1.0, tl.float32)
    if kv_scale is not None:
        scale *= tl.load(kv_scale)
    entry = cache_NBE + slot * (LATENT + ROPE)
    dtype: tl.constexpr = cache_NBE.dtype.element_ty
    tl.store(entry + latent_number, to_cache(latent, scale, dtype), mask=(latent_number >= 0) & (slot >= 0))
    tl.store(entry + LATENT + rope_number, to_cache(rope, scale, dtype), mask=(rope_number >= 0) & (slot >= 0))
