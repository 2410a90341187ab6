"""GEMM of floats with 4-bit weights on a GPU: weights become floats of x's dtype in registers, on the way to the tensor
cores. A row has the same bits in any batch.

Legend: M rows, N outputs, K inputs.
"""

import torch
import triton.language as tl

from kernels.gemm.dense.triton import GemmTile, add_parts, cut_of_k, should_split
from kernels.gemm.int4.layout import GROUP, SPAN, GpuInt4
from kernels.triton_common.integers import cdiv
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, narrow, tile_of_program, widen

# For few rows and for many, as with floats (kernels/gemm/dense/triton.py); a step is a span of inputs. 64 columns: with
# 128, sm_80 and sm_89 spill registers where one program adds parts of K. float32 with 4 warps spills up to 24 B.
FEW = GemmTile(block_m=64, block_n=64, block_k=SPAN, num_warps=4, num_stages=4)
MANY = GemmTile(block_m=128, block_n=64, block_k=SPAN, num_warps=8, num_stages=3)
FLOAT32 = GemmTile(block_m=32, block_n=64, block_k=SPAN, num_warps=8, num_stages=2)
_GROUP_M = 8


@jit
def _floats(codes, scales, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """Weights of 32 inputs, rounded once: products of codes and scales are exact. scales: each column's scale in the
    first half of 32 bits, and its minimum."""
    minima = widen((scales >> 16).to(tl.uint16).to(tl.float16, bitcast=True))
    scales = widen((scales & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True))
    if HAS_ZEROS:
        result = (codes.to(tl.float32) - minima[None]) * scales[None]
    else:
        result = codes.to(tl.float32) * scales[None] + minima[None]
    return narrow(result, DTYPE)


@jit
def _part(
    x_rows,
    w_columns,
    scales,
    row_mask,
    column_mask,
    first_step,
    last_step,
    K,
    N,
    HAS_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_K: tl.constexpr,
):
    """The sum of products over spans first_step to last_step - 1 of K, from zero. scales: of the columns in the first
    group."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, GROUP_K)
    first = first_step * GROUP_K + k
    packed_tile, x_tile = w_columns[None] + first[:, None], x_rows[:, None] + (first_step * GROUP_K + first)[None]
    scales += tl.cast(first_step, tl.int64) * N
    for step in range(first_step, last_step):
        packed = tl.load(packed_tile, mask=column_mask[None], other=0)
        low_mask, high_mask = row_mask[:, None], row_mask[:, None]
        if not EVEN_K:
            inside = 2 * step * GROUP_K + k
            low_mask, high_mask = low_mask & (inside < K)[None], high_mask & (inside + GROUP_K < K)[None]
        low_x = tl.load(x_tile, mask=low_mask, other=0.0)
        both = tl.load(scales, mask=column_mask, other=0)
        low_w = _floats(packed & 15, both.to(tl.uint32), HAS_ZEROS, low_x.dtype)
        acc = dot(low_x, low_w, acc)
        high_x = tl.load(x_tile + GROUP_K, mask=high_mask, other=0.0)
        high_w = _floats(packed >> 4, (both >> 32).to(tl.uint32), HAS_ZEROS, high_x.dtype)
        acc = dot(high_x, high_w, acc)
        packed_tile += GROUP_K
        x_tile += 2 * GROUP_K
        scales += N
    return acc


@jit(do_not_specialize=["M", "part_steps"])
def _int4_gemm_kernel(
    x,
    w,
    scales,
    out,
    bias,
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    part_steps,
    HAS_ZEROS: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_K: tl.constexpr,
):
    """Computes out[p * M + m, n], the sum over part p of K. With FOLD, one program adds all parts, and p is 0."""
    tile_m, tile_n = tile_of_program(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = row < M, column < N
    x_rows, w_columns = x + row * x_stride, w + column * w_stride
    all_steps = tl.cdiv(K, 2 * GROUP_K)
    part = tl.program_id(1)
    if FOLD:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first_step in range(0, all_steps, part_steps):
            last_step = tl.minimum(first_step + part_steps, all_steps)
            acc += _part(
                x_rows,
                w_columns,
                scales + column,
                row_mask,
                column_mask,
                first_step,
                last_step,
                K,
                N,
                HAS_ZEROS,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                GROUP_K,
            )
    else:
        first_step = part * part_steps
        last_step = tl.minimum(first_step + part_steps, all_steps)
        acc = _part(
            x_rows,
            w_columns,
            scales + column,
            row_mask,
            column_mask,
            first_step,
            last_step,
            K,
            N,
            HAS_ZEROS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            GROUP_K,
        )
    if bias is not None:
        acc += widen(tl.load(bias + column, mask=column_mask, other=0.0))[None]
    out_tile = out + (part.to(tl.int64) * M + row)[:, None] * out_stride + column[None]
    tl.store(out_tile, narrow(acc, out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None])


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tile_for(M: int, dtype: torch.dtype) -> GemmTile:
    if dtype is torch.float32:
        return FLOAT32
    return FEW if FEW.block_m >= M else MANY


def int4_gemm(
    x_MK: torch.Tensor,
    weight: GpuInt4,
    *,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: GemmTile | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """Returns y_MN in x's dtype, accumulated in float32 and rounded once. A row's bits depend on the row alone.

    x_MK: bfloat16, float16 or float32, rows contiguous, any row stride. bias_N: in x's dtype. out: memory for the
    result, rows contiguous. tile, split (parts of K are separate programs) are chosen by shapes if they are None; they
    change no bit in 16 bits. Raises ValueError for shapes, dtypes or strides that differ from the above.
    """
    M, N = len(x_MK), len(weight.packed_NB)
    if out is None:
        out = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    _check(x_MK, weight, bias_N, out)
    if not (M and N):
        return out
    K = weight.num_inputs
    tile = tile or tile_for(M, x_MK.dtype)
    cut = cut_of_k(N, K, tile)
    split = (should_split(M, N, tile) if split is None else split) and cut.num_parts > 1
    result = out
    if split:
        result = torch.empty((cut.num_parts * M, N), dtype=torch.float32, device=x_MK.device)
    num_tiles = cdiv(M, tile.block_m) * cdiv(N, tile.block_n)
    _int4_gemm_kernel[(num_tiles, cut.num_parts if split else 1)](
        x_MK,
        weight.packed_NB,
        weight.scales_SN,
        result,
        None if split else bias_N,
        M,
        N,
        K,
        x_MK.stride(0),
        weight.packed_NB.stride(0),
        result.stride(0),
        cut.steps,
        HAS_ZEROS=weight.has_zeros,
        FOLD=cut.num_parts > 1 and not split,
        EVEN_K=K % SPAN == 0,
        GROUP_M=_GROUP_M,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP_K=GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        add_parts(result, out, bias_N, cut.num_parts)
    return out


def _check(x_MK: torch.Tensor, weight: GpuInt4, bias_N: torch.Tensor | None, out: torch.Tensor) -> None:
    N = len(weight.packed_NB)
    if x_MK.dtype not in _DTYPES or x_MK.dim() != 2 or (x_MK.stride(1) != 1 and x_MK.shape[1] > 1):
        raise ValueError(
            f"x of shape {tuple(x_MK.shape)}, strides {x_MK.stride()} and {x_MK.dtype}: has to be a matrix of "
            f"{', '.join(map(str, _DTYPES))}, whose rows are contiguous"
        )
    if x_MK.shape[1] != weight.num_inputs:
        raise ValueError(f"x has rows of {x_MK.shape[1]}, weight of {weight.num_inputs}: they have to be equal")
    if bias_N is not None and (bias_N.shape != (N,) or bias_N.dtype is not x_MK.dtype or not bias_N.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias_N.shape)} and {bias_N.dtype}: has to be [{N}] of {x_MK.dtype}")
    if out.shape != (len(x_MK), N) or out.dtype is not x_MK.dtype or (out.stride(1) != 1 and N > 1):
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: ({len(x_MK)}, {N}) of "
            f"{x_MK.dtype}, its rows contiguous, is expected"
        )
