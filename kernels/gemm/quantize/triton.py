"""Quantizes to e4m3 on a GPU: by token, group of 128, or block of 128 x 128.

Legend: M rows, K columns, N outputs, G = ceil(K / 128).
"""

import torch
import triton.language as tl

from kernels.gemm.quantize.checks import check_input
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import E4M3_MAX, narrow

_INFINITY_BITS = tl.constexpr(0x7F800000)
# Scales are at least this over 448, which is the scale of a group of zeros: far below real activations and weights, and
# large enough for 1 / scale to be finite in float32.
MIN_AMAX = tl.constexpr(1e-10)


@jit
def size_bits(x):
    """|x| of float32 x as int32 with the same order; infinity and NaN are above all finite numbers."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@jit
def scale_of(amax_bits, POWER_OF_TWO: tl.constexpr):
    """The scale of groups whose largest `size_bits` is amax_bits: amax / 448, or the power of two at or above it.

    NaN if a number in the group is not finite.
    """
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), MIN_AMAX)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    if POWER_OF_TWO:
        # The addition carries one into the exponent unless the mantissa is 0.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(amax_bits < _INFINITY_BITS, scale, float("nan"))


@jit
def quantized(x, scale, dtype: tl.constexpr):
    """e4m3 of float32 x / scale, saturated at +-448; NaN where x is not finite or the scale is NaN.

    scale: broadcasts against x. dtype: the output's, as for kernels.triton_common.numbers.narrow.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    is_finite = size_bits(x) < _INFINITY_BITS
    return narrow(tl.where(is_finite, x * inverse, float("nan")), dtype)


GROUP = 128
# A row of up to this many numbers is read once and kept in registers; a longer one is read again, from L2.
_MAX_TILE = 8192
# A group of 128 numbers is 256 bytes of bf16, and 16 rows of it are 32 numbers a thread. Few rows are spread over more
# programs.
_ROWS_PER_PROGRAM, _FEW_ROWS = 16, 64


@jit
def _tokens_kernel(x, q, scales, row_stride, K, POWER_OF_TWO: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    q += row * K
    column = tl.arange(0, TILE)
    if WHOLE:
        numbers = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        s = scale_of(tl.max(size_bits(numbers), 0), POWER_OF_TWO)
        tl.store(q + column, quantized(numbers, s, q.dtype.element_ty), mask=column < K)
    else:
        found = tl.zeros((TILE,), tl.int32)
        for start in range(0, K, TILE):
            numbers = tl.load(x + start + column, mask=start + column < K, other=0.0).to(tl.float32)
            found = tl.maximum(found, size_bits(numbers))
        s = scale_of(tl.max(found, 0), POWER_OF_TWO)
        for start in range(0, K, TILE):
            mask = start + column < K
            numbers = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(q + start + column, quantized(numbers, s, q.dtype.element_ty), mask=mask)
    tl.store(scales + row, s)


@jit(do_not_specialize=["num_rows"])
def _groups_kernel(x, q, scales, num_rows, row_stride, K, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr):
    """Quantizes ROWS rows of one group per program; scales of successive rows are adjacent."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    column = group * 128 + tl.arange(0, 128)
    mask = (row < num_rows)[:, None] & (column < K)[None]
    numbers = tl.load(x + row[:, None] * row_stride + column[None], mask=mask, other=0.0).to(tl.float32)
    s = scale_of(tl.max(size_bits(numbers), 1), POWER_OF_TWO)
    tl.store(q + row[:, None] * K + column[None], quantized(numbers, s[:, None], q.dtype.element_ty), mask=mask)
    tl.store(scales + group.to(tl.int64) * num_rows + row, s, mask=row < num_rows)


@jit(do_not_specialize=["num_rows"])
def _blocks_kernel(w, q, scales, num_rows, row_stride, scale_stride, K, POWER_OF_TWO: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < num_rows)[:, None] & (column < K)[None]
    numbers = tl.load(w + row[:, None] * row_stride + column[None], mask=mask, other=0.0).to(tl.float32)
    s = scale_of(tl.max(tl.max(size_bits(numbers), 1), 0), POWER_OF_TWO)
    tl.store(q + row[:, None] * K + column[None], quantized(numbers, s, q.dtype.element_ty), mask=mask)
    tl.store(scales + tl.program_id(0) * scale_stride + tl.program_id(1), s)


def quantize_tokens(x_MK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_MK of float8_e4m3fn, scales_M1 of float32), a scale per row; for a weight [N, K], per output channel.

    Raises ValueError unless x is a matrix of floats, contiguous in the last dim, and the GPU has e4m3 (from sm_89 on).
    """
    check_input("x", x_MK)
    M, K = x_MK.shape
    q_MK = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    tile = min(next_power_of_2(max(K, 1)), _MAX_TILE)
    if M:
        _tokens_kernel[(M,)](
            x_MK,
            q_MK,
            scales_M1,
            x_MK.stride(0),
            K,
            POWER_OF_TWO=power_of_two,
            WHOLE=tile >= K,
            TILE=tile,
            num_warps=8 if tile > 2048 else 4,
        )
    return q_MK, scales_M1


def quantize_groups(x_MK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_MK of float8_e4m3fn, scales_MG of float32), a scale for each 128 numbers of a row.

    scales_MG is M-major, strides (1, M): a GEMM reads the scales of one group for all rows of its tile, which are then
    adjacent, and scaled_mm requires it. Raises ValueError as quantize_tokens does.
    """
    check_input("x", x_MK)
    M, K = x_MK.shape
    num_groups = cdiv(K, GROUP)
    q_MK = torch.empty((M, K), dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_MG = torch.empty((num_groups, M), dtype=torch.float32, device=x_MK.device).t()
    if q_MK.numel():
        rows = 1 if M <= _FEW_ROWS else _ROWS_PER_PROGRAM
        _groups_kernel[(cdiv(M, rows), num_groups)](
            x_MK,
            q_MK,
            scales_MG,
            M,
            x_MK.stride(0),
            K,
            POWER_OF_TWO=power_of_two,
            ROWS=rows,
            num_warps=1 if rows == 1 else 4,
        )
    return q_MK, scales_MG


def quantize_blocks(weight_NK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_NK of float8_e4m3fn, scales of float32 [ceil(N / 128), G]), a scale for each 128 x 128.

    DeepSeek's checkpoints call them weight and weight_scale_inv. The row stride of the scales is a multiple of 4, as
    scaled_mm requires. Raises ValueError as quantize_tokens does.
    """
    check_input("weight", weight_NK)
    N, K = weight_NK.shape
    grid = (cdiv(N, GROUP), cdiv(K, GROUP))
    q_NK = torch.empty((N, K), dtype=torch.float8_e4m3fn, device=weight_NK.device)
    padded = torch.zeros((grid[0], cdiv(grid[1], 4) * 4), dtype=torch.float32, device=weight_NK.device)
    if q_NK.numel():
        _blocks_kernel[grid](
            weight_NK,
            q_NK,
            padded,
            N,
            weight_NK.stride(0),
            padded.stride(0),
            K,
            POWER_OF_TWO=power_of_two,
            num_warps=8,
        )
    return q_NK, padded[:, : grid[1]]
