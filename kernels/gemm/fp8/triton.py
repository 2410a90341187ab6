"""FP8 GEMM in Triton: bound by reading the weights at few rows, by the tensor cores at many.

Hopper's tensor cores accumulate e4m3 products in less than float32 (some 14 bits), so each of their sums covers at most
128 of K, and these sums are added in float32. Legend: M rows, N outputs, K inputs.
"""

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import INTERPRETED, narrow, tile_of_program
from kernels.triton_common.tuned_tiles import Tile

# Numbers of a row per program of the kernel that adds the parts of K.
_REDUCE_TILE = 1024


@jit
def _dot(a, b, acc, PROMOTE: tl.constexpr):
    """acc + a @ b; with PROMOTE the product is summed up separately, then added to acc in float32."""
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PROMOTE:
        result = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1])
    else:
        result = tl.dot(a, b, acc)
    return result


@jit(do_not_specialize=["M", "x_scale_group_stride", "group_m"])
def _gemm_kernel(
    x,
    w,
    out,
    x_scales,
    w_scales,
    bias,
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    x_scale_row_stride,
    x_scale_group_stride,
    w_scale_row_stride,
    group_m,
    BLOCKWISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes out[m, n], or with SPLIT_K > 1 out[part, m, n] in float32, before bias and scales of rows.

    Rows beyond M are not read: with M = 1, sixteen lanes that read row 0 took 1.17 to 1.48 times as long as 16 rows
    (measured on an H200). Columns beyond N repeat others, so that weights need no mask.
    """
    tile_m, tile_n = tile_of_program(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), group_m)
    part = tl.program_id(1)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, w_row = row < M, column % N
    k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = part * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    x_tile = x + row.to(tl.int64)[:, None] * x_stride + (first * BLOCK_K + k)[None]
    w_tile = w + w_row.to(tl.int64)[None] * w_stride + (first * BLOCK_K + k)[:, None]
    x_scale = x_scales + row * x_scale_row_stride
    if BLOCK_N <= 128:
        # The tile lies in one block of the weight: a single scale.
        w_scale = w_scales + (tile_n * BLOCK_N // 128) * w_scale_row_stride
    else:
        w_scale = w_scales + (w_row // 128) * w_scale_row_stride

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Triton prefetches the operands of a dot, but not scales: here they are loaded one step ahead.
    if BLOCKWISE:
        # The last parts may be empty, and have no scales.
        group = tl.minimum(first * BLOCK_K, K - 1) // 128
        a_scale = tl.load(x_scale + group.to(tl.int64) * x_scale_group_stride, mask=has_row, other=0.0)
        b_scale = tl.load(w_scale + group)
    else:
        a_scale = tl.load(x_scale, mask=has_row, other=0.0)
        b_scale = tl.load(w_scales + w_row * w_scale_row_stride)
    for step in range(first, last):
        if EVEN_K:
            a, b = tl.load(x_tile, mask=has_row[:, None], other=0.0), tl.load(w_tile)
        else:
            a = tl.load(x_tile, mask=has_row[:, None] & (step * BLOCK_K + k < K)[None], other=0.0)
            b = tl.load(w_tile, mask=(step * BLOCK_K + k < K)[:, None], other=0.0)
        if BLOCKWISE:
            group = tl.minimum(step + 1, last - 1) * BLOCK_K // 128
            next_a_scale = tl.load(x_scale + group.to(tl.int64) * x_scale_group_stride, mask=has_row, other=0.0)
            next_b_scale = tl.load(w_scale + group)
            product = _dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), False)
            if BLOCK_N <= 128:
                acc += product * (a_scale * b_scale)[:, None]
            else:
                acc += product * a_scale[:, None] * b_scale[None]
            a_scale, b_scale = next_a_scale, next_b_scale
        else:
            acc = _dot(a, b, acc, True)
        x_tile += BLOCK_K
        w_tile += BLOCK_K

    if SPLIT_K == 1:
        if not BLOCKWISE:
            acc = acc * a_scale[:, None] * b_scale[None]
        if HAS_BIAS:
            acc += tl.load(bias + w_row).to(tl.float32)[None]
    out += part.to(tl.int64) * M * out_stride
    out_tile = out + row.to(tl.int64)[:, None] * out_stride + column[None]
    tl.store(out_tile, narrow(acc, out.dtype.element_ty), mask=has_row[:, None] & (column < N)[None])


@jit(do_not_specialize=["M"])
def _reduce_kernel(
    parts,
    out,
    x_scales,
    w_scales,
    bias,
    M,
    N,
    out_stride,
    x_scale_row_stride,
    w_scale_row_stride,
    BLOCKWISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """out[m, n] = the sum of parts[:, m, n], always in the order of K."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < N
    acc = tl.zeros((TILE,), tl.float32)
    for part in range(SPLIT_K):
        acc += tl.load(parts + (part * M + row) * N + column, mask=mask, other=0.0)
    if not BLOCKWISE:
        acc = acc * tl.load(x_scales + row * x_scale_row_stride)
        acc = acc * tl.load(w_scales + column * w_scale_row_stride, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, narrow(acc, out.dtype.element_ty), mask=mask)


def triton_gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    blockwise: bool,
    tile: Tile,
) -> None:
    """Fills out_MN. Arguments are those that kernels.gemm.fp8.dispatch.fp8_gemm has checked."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    # A single scale is read by every row, with stride 0.
    x_row_stride = x_scales.stride(0) if x_scales.shape[0] == M and x_scales.dim() == 2 else 0
    w_row_stride = weight_scales.stride(0) if weight_scales.numel() > 1 else 0
    result = out_MN
    if tile.split_k > 1:
        result = torch.empty((tile.split_k, M, N), dtype=torch.float32, device=x_MK.device)
    # A placeholder if there is no bias: Triton needs a pointer, read or not.
    bias = x_scales if bias_N is None else bias_N
    grid = (cdiv(M, tile.block_m) * cdiv(N, tile.block_n), tile.split_k)
    _gemm_kernel[grid](
        x_MK,
        weight_NK,
        result,
        x_scales,
        weight_scales,
        bias,
        M,
        N,
        K,
        x_MK.stride(0),
        weight_NK.stride(0),
        result.stride(-2),
        x_row_stride,
        x_scales.stride(-1) if blockwise else 0,
        w_row_stride,
        tile.group_m,
        BLOCKWISE=blockwise,
        HAS_BIAS=bias_N is not None,
        SPLIT_K=tile.split_k,
        EVEN_K=K % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if tile.split_k > 1:
        _reduce_kernel[(M, cdiv(N, _REDUCE_TILE))](
            result,
            out_MN,
            x_scales,
            weight_scales,
            bias,
            M,
            N,
            out_MN.stride(0),
            x_row_stride,
            w_row_stride,
            BLOCKWISE=blockwise,
            HAS_BIAS=bias_N is not None,
            SPLIT_K=tile.split_k,
            TILE=_REDUCE_TILE,
        )
