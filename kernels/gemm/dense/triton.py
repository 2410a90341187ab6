"""GEMM of floats on a GPU: cuBLAS, or a Triton kernel whose rows have the same bits in any batch.

Legend: M rows, N outputs, K inputs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from kernels.triton_common.integers import cdiv
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, narrow, tile_of_program, widen

# Numbers of a row, and warps, per program of the kernel that adds parts.
_REDUCE_TILE, _REDUCE_WARPS = 1024, 4
# About the SMs of an H100 or H200. A constant, so that bits don't depend on the actual number of SMs.
_FULL_GPU = 128
# A part of K is long enough to fill a program's stages and keep them busy for a while. Beyond 8 parts, adding them up
# costs more than the faster reading of weights saves.
_MIN_PART, _MAX_PARTS = 512, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """Rows, columns and depth of a program's tile in shared memory, and its launch parameters."""

    block_m: int
    block_n: int = 128
    block_k: int = 64
    num_warps: int
    num_stages: int


# For few rows, where the time is that of reading weights. 64 rows are the fewest that wgmma takes. A stage has 24 KiB,
# so an SM of Hopper holds 2 programs of 4 stages, with 128 KiB of weights in flight; an L40S holds one.
FEW = GemmTile(block_m=64, num_warps=4, num_stages=4)
# Two warp groups of 64 rows share the weights they read: a third less traffic from L2, the limit of 64 x 128. 32 KiB a
# stage.
MANY = GemmTile(block_m=128, num_warps=8, num_stages=3)
# float32 is computed without tensor cores, from registers.
FLOAT32 = GemmTile(block_m=32, block_n=64, block_k=16, num_warps=4, num_stages=3)
# Tiles computed down the rows before the next column of tiles.
_GROUP_M = 8


class Cut(NamedTuple):
    """A cut of K into num_parts parts of `steps` steps of block_k; the last part may be shorter."""

    num_parts: int
    steps: int


def cut_of_k(N: int, K: int, tile: GemmTile) -> Cut:
    """Returns enough parts to fill a GPU if a batch is one row of tiles. Depends on the weight's shape alone."""
    all_steps = cdiv(K, tile.block_k)
    wanted = min(_FULL_GPU // cdiv(N, tile.block_n), K // _MIN_PART, _MAX_PARTS)
    steps = cdiv(all_steps, max(1, wanted))
    return Cut(num_parts=cdiv(all_steps, steps), steps=steps)


def tile_for(M: int, dtype: torch.dtype) -> GemmTile:
    if dtype is torch.float32:
        return FLOAT32
    return FEW if FEW.block_m >= M else MANY


def should_split(M: int, N: int, tile: GemmTile) -> bool:
    """True if parts of K should be separate programs, because tiles alone would leave SMs idle."""
    return _num_tiles(M, N, tile) < _FULL_GPU


def invariant_gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    *,
    tile: GemmTile,
    split: bool,
) -> None:
    """Fills out_MN. Arguments are those that `gemm` has checked, M above 0. tile and split change no bit."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    cut = cut_of_k(N, K, tile)
    split = split and cut.num_parts > 1
    result = out_MN
    if split:
        result = torch.empty((cut.num_parts * M, N), dtype=torch.float32, device=x_MK.device)
    _gemm_kernel[(_num_tiles(M, N, tile), cut.num_parts if split else 1)](
        x_MK,
        weight_NK,
        result,
        None if split else bias_N,
        M,
        N,
        K,
        x_MK.stride(0),
        weight_NK.stride(0),
        result.stride(0),
        cut.steps,
        FOLD=cut.num_parts > 1 and not split,
        EVEN_K=K % tile.block_k == 0,
        GROUP_M=_GROUP_M,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        add_parts(result, out_MN, bias_N, cut.num_parts)


def add_parts(parts_PN: torch.Tensor, out_MN: torch.Tensor, bias_N: torch.Tensor | None, num_parts: int) -> None:
    """Fills out_MN with the sums of parts of K, float32 [num_parts * M, N], and the bias."""
    M, N = out_MN.shape
    _add_parts_kernel[(M, cdiv(N, _REDUCE_TILE))](
        parts_PN,
        out_MN,
        bias_N,
        M,
        N,
        out_MN.stride(0),
        PARTS=num_parts,
        TILE=_REDUCE_TILE,
        num_warps=_REDUCE_WARPS,
    )


def _num_tiles(M: int, N: int, tile: GemmTile) -> int:
    return cdiv(M, tile.block_m) * cdiv(N, tile.block_n)


@jit
def _part(
    x_rows,
    w_rows,
    row_mask,
    column_mask,
    first_step,
    last_step,
    K,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum of products over steps first_step to last_step - 1 of K, from zero."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = first_step * BLOCK_K + tl.arange(0, BLOCK_K)
    x_tile, w_tile = x_rows[:, None] + k[None], w_rows[None] + k[:, None]
    for step in range(first_step, last_step):
        if EVEN_K:
            x_mask, w_mask = row_mask[:, None], column_mask[None]
        else:
            inside = step * BLOCK_K + tl.arange(0, BLOCK_K) < K
            x_mask, w_mask = row_mask[:, None] & inside[None], column_mask[None] & inside[:, None]
        acc = dot(tl.load(x_tile, mask=x_mask, other=0.0), tl.load(w_tile, mask=w_mask, other=0.0), acc)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    return acc


@jit(do_not_specialize=["M", "part_steps"])
def _gemm_kernel(
    x,
    w,
    out,
    bias,
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    part_steps,
    FOLD: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes out[p * M + m, n], the sum over part p of K. With FOLD, one program adds all parts, and p is 0.

    Rows beyond M are not read, so that the few rows of a decode cost little L2 bandwidth.
    """
    tile_m, tile_n = tile_of_program(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row_mask, column_mask = row < M, column < N
    x_rows, w_rows = x + row * x_stride, w + column * w_stride
    all_steps = tl.cdiv(K, BLOCK_K)
    part = tl.program_id(1)
    if FOLD:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first_step in range(0, all_steps, part_steps):
            last_step = tl.minimum(first_step + part_steps, all_steps)
            acc += _part(
                x_rows, w_rows, row_mask, column_mask, first_step, last_step, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
            )
    else:
        first_step = part * part_steps
        last_step = tl.minimum(first_step + part_steps, all_steps)
        acc = _part(x_rows, w_rows, row_mask, column_mask, first_step, last_step, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias is not None:
        acc += widen(tl.load(bias + column, mask=column_mask, other=0.0))[None]
    out_tile = out + (part.to(tl.int64) * M + row)[:, None] * out_stride + column[None]
    tl.store(out_tile, narrow(acc, out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None])


@jit(do_not_specialize=["M"])
def _add_parts_kernel(parts, out, bias, M, N, out_stride, PARTS: tl.constexpr, TILE: tl.constexpr):
    """out[m, n] = the sum of parts[:, m, n], from left to right, as a program with FOLD adds them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < N
    acc = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        acc += tl.load(parts + (part * M + row) * N + column, mask=mask, other=0.0)
    if bias is not None:
        acc += widen(tl.load(bias + column, mask=mask, other=0.0))
    tl.store(out + row * out_stride + column, narrow(acc, out.dtype.element_ty), mask=mask)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns y_MN in out_dtype, accumulated in float32 and rounded once.

    x_MK: bfloat16, float16 or float32, rows contiguous, any row stride. weight_NK: in x's dtype, rows contiguous.
    bias_N: in x's dtype. out_dtype: one of the three; None means x's. out: memory for the result, rows contiguous.

    batch_invariant: a row's bits depend on the row alone, not on M or its place in the batch. The Triton kernel of this
    file computes, and does not round float32 to tf32. Otherwise torch computes with cuBLAS, which chooses its kernel by
    M; it adds parts of K in float32, too, because worker.device.device.CudaDevice forbids 16 bits there. If out_dtype
    is not x's, which torch does not support everywhere, the Triton kernel computes.

    Raises ValueError for shapes, dtypes or strides that differ from the above.
    """
    out_dtype = out_dtype or x_MK.dtype
    _check(x_MK, weight_NK, bias_N, out_dtype)
    M, N = len(x_MK), len(weight_NK)
    if out is not None and (out.shape != (M, N) or out.dtype is not out_dtype or (out.stride(1) != 1 and N > 1)):
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: ({M}, {N}) of {out_dtype}, its "
            "rows contiguous, is expected"
        )
    if not batch_invariant and out_dtype is x_MK.dtype:
        if bias_N is None:
            return torch.mm(x_MK, weight_NK.t(), out=out)
        return torch.addmm(bias_N, x_MK, weight_NK.t(), out=out)
    if out is None:
        out = torch.empty((M, N), dtype=out_dtype, device=x_MK.device)
    if M and N:
        tile = tile_for(M, x_MK.dtype)
        invariant_gemm(x_MK, weight_NK, bias_N, out, tile=tile, split=should_split(M, N, tile))
    return out


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    dtypes = ", ".join(map(str, _DTYPES))
    if x_MK.dtype not in _DTYPES or out_dtype not in _DTYPES:
        raise ValueError(f"x of {x_MK.dtype} and out_dtype={out_dtype}: both have to be of {dtypes}")
    for name, matrix in (("x", x_MK), ("weight", weight_NK)):
        if matrix.dim() != 2 or matrix.dtype is not x_MK.dtype or (matrix.stride(1) != 1 and matrix.shape[1] > 1):
            raise ValueError(
                f"{name} of shape {tuple(matrix.shape)}, strides {matrix.stride()} and {matrix.dtype}: has to be a "
                f"matrix of {x_MK.dtype}, as x is, whose rows are contiguous"
            )
    if x_MK.shape[1] != weight_NK.shape[1] or not x_MK.shape[1]:
        raise ValueError(
            f"x has rows of {x_MK.shape[1]}, weight of {weight_NK.shape[1]}: they have to be equal, and above 0"
        )
    N = len(weight_NK)
    if bias_N is not None and (bias_N.shape != (N,) or bias_N.dtype is not x_MK.dtype or not bias_N.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias_N.shape)} and {bias_N.dtype}: has to be [{N}] of {x_MK.dtype}")
