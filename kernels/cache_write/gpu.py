"""Cache write on a GPU, quantizing if the cache is FP8. The cache is laid out as kernels/paged_attention/gpu_cache.py
says.

Legend: T tokens, N blocks, B tokens of a block, K KV heads, D head size.
"""

import torch
import triton
import triton.language as tl

from kernels.fp8_quantize.scales import quantized
from kernels.paged_attention.gpu_cache import check_gpu_cache, kernel_view
from kernels.tiles.jit import jit
from kernels.tiles.numbers import narrow, widen

# Numbers of the keys, and as many of the values, that a program moves: with 4 warps, a 16-byte vector of each a thread,
# both loaded before the slots, on which they don't depend, have come.
_TILE = 1024
_NUM_WARPS = 4


def cache_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cache_N2KBD: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes token t's keys and values to slot slots_T[t] = block * B + offset; a negative slot, as padding has it,
    touches nothing.

    k_TKD, v_TKD: fp32, bf16 or fp16, of any strides but 1 in the last dim (slices of qkv). Rounded to the cache's
    dtype. slots_T: int32 or int64; those not negative are all different. May be shorter than T: the rest is not
    written. k_scale, v_scale: float32 [1] or [K] on the device, of an e4m3 cache: what is stored is number / scale,
    saturated at 448.

    Raises ValueError for a cache in another layout, shapes that differ, an e4m3 cache without scales, scales of another
    shape, and scales of a cache that has none.
    """
    check_gpu_cache(cache_N2KBD)
    num_kv_heads, block_size, head_size = cache_N2KBD.shape[2:]
    for name, x_TKD in (("k", k_TKD), ("v", v_TKD)):
        if x_TKD.shape[1:] != (num_kv_heads, head_size) or x_TKD.stride(2) != 1 or len(x_TKD) < len(slots_T):
            raise ValueError(
                f"{name} of shape {tuple(x_TKD.shape)}, strides {x_TKD.stride()}: for {len(slots_T)} slots of this "
                f"cache it has to be [at least {len(slots_T)}, {num_kv_heads}, {head_size}], contiguous in the last dim"
            )
    check_kv_scales(cache_N2KBD, k_scale, v_scale)
    if not len(slots_T):
        return
    rows, tile = tile_of(head_size)
    cache_N2KBD = kernel_view(cache_N2KBD)
    _cache_write_kernel[(triton.cdiv(len(slots_T) * num_kv_heads, rows),)](
        k_TKD, v_TKD, cache_N2KBD, slots_T, k_scale, v_scale, len(slots_T),
        k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
        NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HEAD_SIZE=head_size,
        K_SCALES=0 if k_scale is None else len(k_scale), V_SCALES=0 if v_scale is None else len(v_scale),
        ROWS=rows, TILE=tile, num_warps=_NUM_WARPS,
    )  # fmt: skip


def tile_of(head_size: int) -> tuple[int, int]:
    """(heads, numbers of a head, a power of two) of a program."""
    tile = triton.next_power_of_2(head_size)
    return max(1, _TILE // tile), tile


def check_kv_scales(cache_N2KBD: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Raises ValueError unless both scales are there, float32 [1] or [K], for an e4m3 cache, and neither for
    another."""
    shapes = ((1,), (cache_N2KBD.shape[2],))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if cache_N2KBD.dtype is not torch.float8_e4m3fn:
            if scale is not None:
                raise ValueError(f"{name} is for a cache of float8_e4m3fn; kv_cache_dtype is {cache_N2KBD.dtype}")
        elif scale is None:
            raise ValueError(f"{name} is None; a cache of float8_e4m3fn needs it (ones, if nothing better is known)")
        elif scale.dtype is not torch.float32 or tuple(scale.shape) not in shapes:
            raise ValueError(
                f"{name} is {scale.dtype} {tuple(scale.shape)}; float32 {shapes[0]} or {shapes[1]} is expected"
            )


@jit
def head_scales(scale_ptr, heads, NUM_SCALES: tl.constexpr):
    """float32 scales of `heads`, of any shape; NUM_SCALES is 0 (ones), 1 (the same for all) or one a head."""
    if NUM_SCALES == 0:
        result = tl.full(heads.shape, 1.0, tl.float32)
    elif NUM_SCALES == 1:
        result = tl.full(heads.shape, 1.0, tl.float32) * tl.load(scale_ptr)
    else:
        result = tl.load(scale_ptr + heads, mask=(heads >= 0) & (heads < NUM_SCALES), other=1.0)
    return result


@jit
def to_cache(x, scale, dtype: tl.constexpr):
    """float32 x as a cache of `dtype` stores it; scale broadcasts against x, and is not looked at unless that is
    e4m3."""
    if (dtype == tl.float8e4nv) | (dtype == tl.uint8):
        result = quantized(x, scale, dtype)
    else:
        result = narrow(x, dtype)
    return result


@jit(do_not_specialize=["num_tokens"])
def _cache_write_kernel(
    k_TKD,
    v_TKD,
    cache_N2KBD,
    slots_T,
    k_scale,
    v_scale,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A row is one head of one token: so a rank's single KV head fills a program as well as 32 do."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = row % NUM_KV_HEADS
    numbers = tl.arange(0, TILE)[None]
    inside = (token < num_tokens)[:, None] & (numbers < HEAD_SIZE)
    k = widen(tl.load(k_TKD + (token * k_token_stride + head * k_head_stride)[:, None] + numbers, mask=inside))
    v = widen(tl.load(v_TKD + (token * v_token_stride + head * v_head_stride)[:, None] + numbers, mask=inside))
    slot = tl.load(slots_T + token, mask=token < num_tokens, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (numbers < HEAD_SIZE)
    # The block's keys are [K, B, D], its values the next K * B * D numbers.
    keys = (slot // BLOCK_SIZE) * (2 * NUM_KV_HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + slot % BLOCK_SIZE
    key_ptrs = cache_N2KBD + keys[:, None] * HEAD_SIZE + numbers
    k_scales, v_scales = head_scales(k_scale, head[:, None], K_SCALES), head_scales(v_scale, head[:, None], V_SCALES)
    dtype: tl.constexpr = cache_N2KBD.dtype.element_ty
    tl.store(key_ptrs, to_cache(k, k_scales, dtype), mask=mask)
    tl.store(key_ptrs + NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE, to_cache(v, v_scales, dtype), mask=mask)
