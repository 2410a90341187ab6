"""Head norms, rope and cache write in one Triton kernel, quantizing if the cache is e4m3.

Legend: T tokens, H heads, K KV heads, D head size, F >= (H + 2 K) * D, L rows of the table, R <= D rotary dims,
N blocks, B tokens of a block.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from kernels.elementwise.rope.triton import check_cos_sin, load_cos_sin, load_pairs, store_pairs
from kernels.gemm.quantize.triton import quantized
from kernels.kv_cache.layout import check_gpu_cache, kernel_view
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import narrow, widen


def check_kv_scales(cache_N2KBD: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Raises ValueError unless an e4m3 cache has both scales, float32 [1] or [K], and any other cache has none."""
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
    """float32 scales for `heads`, of any shape. NUM_SCALES: 0 (ones), 1 (one for all) or the number of heads."""
    if NUM_SCALES == 0:
        result = tl.full(heads.shape, 1.0, tl.float32)
    elif NUM_SCALES == 1:
        result = tl.full(heads.shape, 1.0, tl.float32) * tl.load(scale_ptr)
    else:
        result = tl.load(scale_ptr + heads, mask=(heads >= 0) & (heads < NUM_SCALES), other=1.0)
    return result


@jit
def to_cache(x, scale, dtype: tl.constexpr):
    """Converts float32 x to the cache's `dtype`. scale broadcasts against x, and is ignored unless the cache is
    e4m3."""
    if (dtype == tl.float8e4nv) | (dtype == tl.uint8):
        result = quantized(x, scale, dtype)
    else:
        result = narrow(x, dtype)
    return result


# Numbers that a program moves: with 4 warps two 16-byte vectors of bf16 a thread. All heads of a program belong to one
# token, so that it reads cosines and sines once.
_TILE, _NUM_WARPS = 2048, 4


class HeadNorms(NamedTuple):
    """RMS norms of each head of q and of k, before rope."""

    # [D] each, any float dtype, contiguous.
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rope_cache_write(
    qkv_TF: torch.Tensor,
    cos_sin_LR: torch.Tensor,
    cache_N2KBD: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    head_norms: HeadNorms | None = None,
    positions_T: torch.Tensor | None = None,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms and rotates q in place, and returns it as a view of qkv_TF, [T, H, D]. Writes k, normed and rotated, and v
    to the cache; both stay as they are in qkv_TF.

    qkv_TF: fp32, bf16 or fp16; a row has the heads of q, of k, of v; contiguous in the last dim. cos_sin_LR,
    positions_T, interleaved: as for kernels.elementwise.rope.triton.rope_. slots_T: int32 or int64, block * B + offset
    of each token; a negative slot (padding) writes nothing; the others are all different. k_scale, v_scale: float32 [1]
    or [K] on the device, for an e4m3 cache, which stores number / scale, saturated at 448.

    Raises ValueError for a cache in another layout, tensors that do not fit together, and scales that do not suit the
    cache's dtype.
    """
    check_gpu_cache(cache_N2KBD)
    num_kv_heads, block_size, head_size = cache_N2KBD.shape[2:]
    num_tokens, row = len(qkv_TF), (num_heads + 2 * num_kv_heads) * head_size
    if qkv_TF.shape[1] < row or qkv_TF.stride(1) != 1:
        raise ValueError(
            f"qkv of shape {tuple(qkv_TF.shape)}, strides {qkv_TF.stride()}: {num_heads} + 2 * {num_kv_heads} heads of "
            f"{head_size} are {row} columns, contiguous"
        )
    if len(slots_T) != num_tokens:
        raise ValueError(f"{len(slots_T)} slots for {num_tokens} tokens; padding needs slots too, negative ones")
    num_pairs = check_cos_sin(cos_sin_LR, positions_T, num_tokens, head_size)
    check_kv_scales(cache_N2KBD, k_scale, v_scale)
    if head_norms is not None and not head_norms.q_weight.shape == head_norms.k_weight.shape == (head_size,):
        raise ValueError(
            f"head norms of shapes {tuple(head_norms.q_weight.shape)}, {tuple(head_norms.k_weight.shape)}: "
            f"({head_size},) is expected"
        )
    if num_tokens:
        pairs, rest = next_power_of_2(num_pairs), next_power_of_2(max(1, head_size - 2 * num_pairs))
        all_heads = num_heads + 2 * num_kv_heads
        heads = min(max(1, _TILE // next_power_of_2(head_size)), next_power_of_2(all_heads))
        _rope_cache_write_kernel[(num_tokens, cdiv(all_heads, heads))](
            qkv_TF,
            cos_sin_LR,
            positions_T,
            kernel_view(cache_N2KBD),
            slots_T,
            None if head_norms is None else head_norms.q_weight,
            None if head_norms is None else head_norms.k_weight,
            k_scale,
            v_scale,
            0.0 if head_norms is None else head_norms.eps,
            qkv_TF.stride(0),
            cos_sin_LR.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            BLOCK_SIZE=block_size,
            NUM_PAIRS=num_pairs,
            INTERLEAVED=interleaved,
            K_SCALES=0 if k_scale is None else len(k_scale),
            V_SCALES=0 if v_scale is None else len(v_scale),
            HEADS=heads,
            PAIRS=pairs,
            REST=rest,
            num_warps=_NUM_WARPS,
        )
    return qkv_TF[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))


@jit
def _rope_cache_write_kernel(
    qkv_TF,
    cos_sin_LR,
    positions_T,
    cache_N2KBD,
    slots_T,
    q_weight_D,
    k_weight_D,
    k_scale,
    v_scale,
    eps,
    token_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Processes some heads of one token, any of q's, k's and v's: a head of v has weights of 1 and angles of 0. REST: a
    power of two, at least the number of a head's numbers that are not rotated, which may be 0."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q, is_v = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    inside = head < NUM_HEADS + 2 * NUM_KV_HEADS
    head_ptrs = qkv_TF + token * token_stride + head * HEAD_SIZE
    first, second = load_pairs(head_ptrs, inside, NUM_PAIRS, PAIRS, INTERLEAVED)
    rest_number = 2 * NUM_PAIRS + tl.arange(0, REST)[None]
    rest_mask = inside & (rest_number < HEAD_SIZE)
    rest = widen(tl.load(head_ptrs + rest_number, mask=rest_mask, other=0.0))
    if positions_T is None:
        row = token
    else:
        row = tl.load(positions_T + token).to(tl.int64)
    cos, sin = load_cos_sin(cos_sin_LR, row, row_stride, NUM_PAIRS, PAIRS)
    # A tensor of one number, not a scalar: when the interpreter broadcasts a scalar's comparison, it becomes an
    # integer.
    slot = tl.load(slots_T + token + tl.arange(0, 1)[None]).to(tl.int64)

    if q_weight_D is not None:
        square = tl.sum(first * first + second * second, 1, keep_dims=True)
        square += tl.sum(rest * rest, 1, keep_dims=True)
        inverse = tl.rsqrt(square / HEAD_SIZE + eps)
        one = tl.arange(0, 1)[None]
        q_weight_first, q_weight_second = load_pairs(q_weight_D + one, one == 0, NUM_PAIRS, PAIRS, INTERLEAVED)
        k_weight_first, k_weight_second = load_pairs(k_weight_D + one, one == 0, NUM_PAIRS, PAIRS, INTERLEAVED)
        first *= tl.where(is_v, 1.0, inverse * tl.where(is_q, q_weight_first, k_weight_first))
        second *= tl.where(is_v, 1.0, inverse * tl.where(is_q, q_weight_second, k_weight_second))
        q_rest = widen(tl.load(q_weight_D + rest_number, mask=rest_number < HEAD_SIZE, other=0.0))
        k_rest = widen(tl.load(k_weight_D + rest_number, mask=rest_number < HEAD_SIZE, other=0.0))
        rest *= tl.where(is_v, 1.0, inverse * tl.where(is_q, q_rest, k_rest))
    turned_first = tl.where(is_v, first, first * cos - second * sin)
    turned_second = tl.where(is_v, second, second * cos + first * sin)

    q_dtype: tl.constexpr = qkv_TF.dtype.element_ty
    q_first, q_second = narrow(turned_first, q_dtype), narrow(turned_second, q_dtype)
    store_pairs(head_ptrs, is_q, q_first, q_second, NUM_PAIRS, PAIRS, INTERLEAVED)
    tl.store(head_ptrs + rest_number, narrow(rest, q_dtype), mask=rest_mask & is_q)

    kv_head = tl.where(is_q, 0, head - tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    # The block's keys are [K, B, D], its values the next K * B * D numbers.
    cache_row = ((slot // BLOCK_SIZE * 2 + is_v.to(tl.int64)) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    cache_ptrs = cache_N2KBD + cache_row * HEAD_SIZE
    is_written = (slot >= 0) & inside & (head >= NUM_HEADS)
    scale = tl.where(is_v, head_scales(v_scale, kv_head, V_SCALES), head_scales(k_scale, kv_head, K_SCALES))
    cache_dtype: tl.constexpr = cache_N2KBD.dtype.element_ty
    kv_first, kv_second = to_cache(turned_first, scale, cache_dtype), to_cache(turned_second, scale, cache_dtype)
    store_pairs(cache_ptrs, is_written, kv_first, kv_second, NUM_PAIRS, PAIRS, INTERLEAVED)
    tl.store(cache_ptrs + rest_number, to_cache(rest, scale, cache_dtype), mask=rest_mask & is_written)
