"""Rope on a GPU, from a table of cosines and sines, with a row per position or per token of a step.

Legend: T tokens, L rows of the table, H heads of q, K heads of k, D head size, P pairs rotated, R = 2 P <= D rotary
dims.
"""

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import narrow, widen


@jit
def load_cos_sin(cos_sin, row, row_stride, NUM_PAIRS: tl.constexpr, P: tl.constexpr):
    """Loads a row of a table, NUM_PAIRS cosines and then as many sines, as float32 (cos, sin), [1, P] each."""
    pair = tl.arange(0, P)[None]
    ptrs = cos_sin + row * row_stride + pair
    mask = pair < NUM_PAIRS
    return widen(tl.load(ptrs, mask=mask, other=0.0)), widen(tl.load(ptrs + NUM_PAIRS, mask=mask, other=0.0))


@jit
def load_pairs(heads_H1, mask_H1, NUM_PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads float32 (first, second), [H, P] each; 0 where masked. heads_H1: pointers to the first number of each head.

    Interleaved pairs are (2i, 2i + 1), others (i, i + NUM_PAIRS). One thread holds both numbers of a pair, so heads can
    be changed in place.
    """
    if INTERLEAVED:
        # Loading whole rows, then splitting, reads 16-byte vectors; a tile of pairs would load two numbers at a time.
        number = tl.arange(0, 2 * P)[None]
        both = widen(tl.load(heads_H1 + number, mask=mask_H1 & (number < 2 * NUM_PAIRS), other=0.0))
        first, second = tl.split(tl.reshape(both, (both.shape[0], P, 2)))
    else:
        pair = tl.arange(0, P)[None]
        mask = mask_H1 & (pair < NUM_PAIRS)
        first = widen(tl.load(heads_H1 + pair, mask=mask, other=0.0))
        second = widen(tl.load(heads_H1 + NUM_PAIRS + pair, mask=mask, other=0.0))
    return first, second


@jit
def store_pairs(heads_H1, mask_H1, first, second, NUM_PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Stores pairs where `load_pairs` loads them. first and second have the dtype of the heads in memory."""
    if INTERLEAVED:
        number = tl.arange(0, 2 * P)[None]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * P))
        tl.store(heads_H1 + number, both, mask=mask_H1 & (number < 2 * NUM_PAIRS))
    else:
        pair = tl.arange(0, P)[None]
        mask = mask_H1 & (pair < NUM_PAIRS)
        tl.store(heads_H1 + pair, first, mask=mask)
        tl.store(heads_H1 + NUM_PAIRS + pair, second, mask=mask)


# Numbers that a program rotates: with 4 warps two 16-byte vectors of bf16 a thread. All heads of a program belong to
# one token, so that it reads cosines and sines once.
_TILE, _NUM_WARPS = 2048, 4
_TOKENS_OF_ROWS = 16


def cos_sin_rows(
    positions_T: torch.Tensor,
    frequencies_P: torch.Tensor,
    magnitude: float = 1.0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [T, R]: row t is the cosines, then the sines, of positions_T[t] * frequencies_P, times magnitude.

    positions_T: int32 or int64, contiguous. frequencies_P: float32, radians a token; the product is rounded to float32,
    as in training. out: contiguous memory for the result.
    """
    num_tokens, num_pairs = len(positions_T), len(frequencies_P)
    if out is None:
        out = torch.empty(num_tokens, 2 * num_pairs, dtype=torch.float32, device=positions_T.device)
    assert positions_T.is_contiguous()
    assert out.is_contiguous()
    if num_tokens:
        _cos_sin_kernel[(cdiv(num_tokens, _TOKENS_OF_ROWS),)](
            positions_T,
            frequencies_P,
            out,
            magnitude,
            num_tokens,
            NUM_PAIRS=num_pairs,
            TOKENS=_TOKENS_OF_ROWS,
            PAIRS=next_power_of_2(num_pairs),
            num_warps=_NUM_WARPS,
        )
    return out


def rope_(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_sin_LR: torch.Tensor,
    *,
    positions_T: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Rotates the first R numbers of every head of q and k in place, computing in float32 and rounding once.

    q_THD, k_TKD: fp32, bf16 or fp16, with stride 1 in the last dim and any others (slices of qkv). cos_sin_LR: any
    float dtype, contiguous in the last dim, P cosines and P sines a row. positions_T: int32 or int64, each token's row,
    0 to L - 1; None: row t is token t's. interleaved: pairs are (2i, 2i + 1), as in GPT-J, rather than (i, i + P), as
    in GPT-NeoX and Llama. Raises ValueError for tensors that do not fit together.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    if (k_TKD.shape[0], k_TKD.shape[2]) != (num_tokens, head_size) or q_THD.stride(2) != 1 or k_TKD.stride(2) != 1:
        raise ValueError(
            f"q of shape {tuple(q_THD.shape)}, strides {q_THD.stride()}, and k of {tuple(k_TKD.shape)}, "
            f"{k_TKD.stride()}: tokens and head size have to be the same, and the last dim contiguous"
        )
    num_pairs = check_cos_sin(cos_sin_LR, positions_T, num_tokens, head_size)
    if not num_tokens:
        return
    num_kv_heads, pairs = k_TKD.shape[1], next_power_of_2(num_pairs)
    heads = min(max(1, _TILE // (2 * pairs)), next_power_of_2(max(num_heads, num_kv_heads)))
    _rope_kernel[(num_tokens, cdiv(num_heads, heads) + cdiv(num_kv_heads, heads))](
        q_THD,
        k_TKD,
        cos_sin_LR,
        positions_T,
        q_THD.stride(0),
        q_THD.stride(1),
        k_TKD.stride(0),
        k_TKD.stride(1),
        cos_sin_LR.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        NUM_PAIRS=num_pairs,
        INTERLEAVED=interleaved,
        HEADS=heads,
        PAIRS=pairs,
        num_warps=_NUM_WARPS,
    )


def check_cos_sin(cos_sin_LR: torch.Tensor, positions_T: torch.Tensor | None, num_tokens: int, head_size: int) -> int:
    """Returns P. Raises ValueError if the table or the positions don't fit the tokens and their heads."""
    num_rows, rotary_dims = cos_sin_LR.shape
    if rotary_dims % 2 or not 0 < rotary_dims <= head_size or cos_sin_LR.stride(1) != 1:
        raise ValueError(
            f"cos_sin of shape {tuple(cos_sin_LR.shape)}, strides {cos_sin_LR.stride()}: a row needs an even number of "
            f"dims, 2 to {head_size}, the head size, and must be contiguous"
        )
    if positions_T is None and num_rows < num_tokens:
        raise ValueError(f"cos_sin has {num_rows} rows for {num_tokens} tokens; without positions each needs one")
    if positions_T is not None and (len(positions_T) < num_tokens or positions_T.stride(0) != 1):
        raise ValueError(f"positions of shape {tuple(positions_T.shape)}, contiguous: {num_tokens} are expected")
    return rotary_dims // 2


@jit
def _cos_sin(angle):
    """float32 (cos, sin) of float32 angles, to 1e-7. Angles beyond 105615, as in long contexts, are reduced by tl.cos
    and tl.sin in a loop over a table, which Triton 3.6 puts on the stack; float64 reduces all angles alike."""
    # The nearest quarter turn, and the remainder, within pi / 4.
    quarters = tl.floor(angle.to(tl.float64) * 0.6366197723675814 + 0.5)
    rest = (angle.to(tl.float64) - quarters * 1.5707963267948966).to(tl.float32)
    square = rest * rest
    # Polynomials of the Cephes library's sinf and cosf.
    sin = rest + rest * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cos = (
        1.0
        - 0.5 * square
        + square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    quarter = quarters.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    turned_cos, turned_sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    return (
        tl.where((quarter == 1) | (quarter == 2), -turned_cos, turned_cos),
        tl.where(quarter >= 2, -turned_sin, turned_sin),
    )


@jit(do_not_specialize=["num_tokens"])
def _cos_sin_kernel(
    positions_T,
    frequencies_P,
    out_TR,
    magnitude,
    num_tokens,
    NUM_PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)[None]
    position = tl.load(positions_T + token, mask=token < num_tokens, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequencies_P + pair, mask=pair < NUM_PAIRS, other=0.0)
    ptrs = out_TR + token.to(tl.int64)[:, None] * (2 * NUM_PAIRS) + pair
    mask = (token < num_tokens)[:, None] & (pair < NUM_PAIRS)
    cos, sin = _cos_sin(angle)
    tl.store(ptrs, cos * magnitude, mask=mask)
    tl.store(ptrs + NUM_PAIRS, sin * magnitude, mask=mask)


@jit
def _turn_heads(
    token_ptr,
    first_head,
    head_stride,
    cos_1P,
    sin_1P,
    NUM_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    head = (first_head + tl.arange(0, HEADS))[:, None]
    head_ptrs = token_ptr + head * head_stride
    first, second = load_pairs(head_ptrs, head < NUM_HEADS, NUM_PAIRS, PAIRS, INTERLEAVED)
    dtype: tl.constexpr = token_ptr.dtype.element_ty
    turned_first = narrow(first * cos_1P - second * sin_1P, dtype)
    turned_second = narrow(second * cos_1P + first * sin_1P, dtype)
    store_pairs(head_ptrs, head < NUM_HEADS, turned_first, turned_second, NUM_PAIRS, PAIRS, INTERLEAVED)


@jit
def _rope_kernel(
    q_THD,
    k_TKD,
    cos_sin_LR,
    positions_T,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if positions_T is None:
        row = token
    else:
        row = tl.load(positions_T + token).to(tl.int64)
    cos_1P, sin_1P = load_cos_sin(cos_sin_LR, row, row_stride, NUM_PAIRS, PAIRS)
    tile = tl.program_id(1)
    num_q_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if tile < num_q_tiles:
        _turn_heads(
            q_THD + token * q_token_stride,
            tile * HEADS,
            q_head_stride,
            cos_1P,
            sin_1P,
            NUM_HEADS,
            NUM_PAIRS,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )
    else:
        _turn_heads(
            k_TKD + token * k_token_stride,
            (tile - num_q_tiles) * HEADS,
            k_head_stride,
            cos_1P,
            sin_1P,
            NUM_KV_HEADS,
            NUM_PAIRS,
            INTERLEAVED,
            HEADS,
            PAIRS,
        )
