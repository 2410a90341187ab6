"""Gated activations (silu, gelu, clamped SwiGLU) on a GPU, optionally quantized to e4m3.

All functions: gate_up_T2N is fp32, bf16 or fp16, contiguous in the last dim, and its first N columns are the gate;
computed in float32. Quantization is that of kernels.gemm.quantize, applied to the result rounded to the input's dtype,
so a fused function equals its two unfused parts.

Legend: T tokens, N columns of the result, G = ceil(N / 128).
"""

import torch
import triton.language as tl

from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.gemm.quantize.checks import check_device
from kernels.gemm.quantize.triton import quantized, scale_of, size_bits
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import narrow, widen

GROUP = 128
# Columns of a program: with 4 warps, a 16-byte vector of gate and one of up a thread. A row is spread over several
# programs, since a decode step has few rows.
_TILE, _NUM_WARPS = 1024, 4
# A row of up to this many columns is computed once and kept in registers; a longer row is computed again, from L2, once
# its scale is known.
_MAX_ROW_TILE = 8192
# As kernels know them.
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}


def silu_mul(
    gate_up_T2N: torch.Tensor, *, activation: Activation = "silu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [T, N] in the input's dtype. activation: the gate's; gelu in its tanh form. out: memory for the result,
    contiguous in the last dim; it may be the gate itself.

    Raises ValueError for an input that differs from the above, or an `out` of another shape or dtype.
    """
    num_tokens, size = _checked_shape(gate_up_T2N, activation)
    if out is None:
        out = torch.empty(num_tokens, size, dtype=gate_up_T2N.dtype, device=gate_up_T2N.device)
    elif out.shape != (num_tokens, size) or out.dtype is not gate_up_T2N.dtype or out.stride(1) != 1:
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: ({num_tokens}, {size}) of "
            f"{gate_up_T2N.dtype}, contiguous in the last dim, is expected"
        )
    if out.numel():
        tile = min(_TILE, next_power_of_2(size))
        _silu_mul_kernel[(num_tokens, cdiv(size, tile))](
            gate_up_T2N,
            out,
            gate_up_T2N.stride(0),
            out.stride(0),
            SIZE=size,
            ACTIVATION=ACTIVATIONS[activation],
            TILE=tile,
            num_warps=_NUM_WARPS,
        )
    return out


def silu_mul_quantize_tokens(
    gate_up_T2N: torch.Tensor, *, activation: Activation = "silu", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_TN of float8_e4m3fn, scales_T1 float32): kernels.gemm.quantize.triton.quantize_tokens of `silu_mul`.

    Raises ValueError for an input that differs from the above, or a GPU without e4m3 (before sm_89).
    """
    num_tokens, size = _checked_shape(gate_up_T2N, activation)
    check_device(gate_up_T2N.device)
    q_TN = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=gate_up_T2N.device)
    scales_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=gate_up_T2N.device)
    if q_TN.numel():
        tile = min(_MAX_ROW_TILE, next_power_of_2(size))
        _silu_mul_tokens_kernel[(num_tokens,)](
            gate_up_T2N,
            q_TN,
            scales_T1,
            gate_up_T2N.stride(0),
            SIZE=size,
            ACTIVATION=ACTIVATIONS[activation],
            POWER_OF_TWO=power_of_two,
            TILE=tile,
            num_warps=row_warps(tile),
        )
    return q_TN, scales_T1


def silu_mul_quantize_groups(
    gate_up_T2N: torch.Tensor, *, activation: Activation = "silu", power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_TN of float8_e4m3fn, scales_TG float32): kernels.gemm.quantize.triton.quantize_groups of `silu_mul`,
    with a scale for each 128 columns, of strides (1, T).

    Errors as in `silu_mul_quantize_tokens`.
    """
    num_tokens, size = _checked_shape(gate_up_T2N, activation)
    check_device(gate_up_T2N.device)
    num_groups = cdiv(size, GROUP)
    q_TN = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=gate_up_T2N.device)
    scales_TG = torch.empty(num_groups, num_tokens, dtype=torch.float32, device=gate_up_T2N.device).t()
    if q_TN.numel():
        groups = min(_TILE // GROUP, next_power_of_2(num_groups))
        _silu_mul_groups_kernel[(num_tokens, cdiv(num_groups, groups))](
            gate_up_T2N,
            q_TN,
            scales_TG,
            gate_up_T2N.stride(0),
            num_tokens,
            SIZE=size,
            ACTIVATION=ACTIVATIONS[activation],
            POWER_OF_TWO=power_of_two,
            GROUPS=groups,
            num_warps=_NUM_WARPS,
        )
    return q_TN, scales_TG


def row_warps(tile: int) -> int:
    """Warps of a program that keeps `tile` columns, a power of two: 16 numbers a thread. With 32 numbers, ptxas spills
    (8 bytes of stack at tile 8192 and 8 warps)."""
    return max(1, tile // 512)


def _checked_shape(gate_up_T2N: torch.Tensor, activation: str) -> tuple[int, int]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: it must be one of {', '.join(ACTIVATIONS)}")
    if gate_up_T2N.dim() != 2 or gate_up_T2N.shape[1] % 2 or gate_up_T2N.stride(1) != 1:
        raise ValueError(
            f"gate_up of shape {tuple(gate_up_T2N.shape)}, strides {gate_up_T2N.stride()}: it must be a matrix of an "
            "even number of columns, contiguous in the last dim"
        )
    return gate_up_T2N.shape[0], gate_up_T2N.shape[1] // 2


@jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, float32. ACTIVATION: 0 silu, 1 gelu_tanh, 2 clamped_swiglu."""
    if ACTIVATION == 2:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        argument = 1.702 * gate
    elif ACTIVATION == 1:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u).
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        argument = gate
    # exp of a number that is never positive cannot overflow.
    small = tl.exp(-tl.abs(argument))
    sigmoid = tl.where(argument >= 0, 1.0, small) / (1.0 + small)
    return gate * sigmoid * up


@jit
def _activated(gate_up, columns, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    """The result's columns, rounded to the input's dtype and returned as float32; 0 beyond SIZE."""
    gate = widen(tl.load(gate_up + columns, mask=columns < SIZE, other=0.0))
    up = widen(tl.load(gate_up + SIZE + columns, mask=columns < SIZE, other=0.0))
    return widen(narrow(gated(gate, up, ACTIVATION), gate_up.dtype.element_ty))


@jit
def _silu_mul_kernel(
    gate_up_T2N, out_TN, row_stride, out_stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    y = _activated(gate_up_T2N + row * row_stride, columns, SIZE, ACTIVATION)
    tl.store(out_TN + row * out_stride + columns, narrow(y, out_TN.dtype.element_ty), mask=columns < SIZE)


@jit
def _silu_mul_tokens_kernel(
    gate_up_T2N,
    q_TN,
    scales_T1,
    row_stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate_up = gate_up_T2N + row * row_stride
    q = q_TN + row * SIZE
    columns = tl.arange(0, TILE)
    if TILE >= SIZE:
        y = _activated(gate_up, columns, SIZE, ACTIVATION)
        scale = scale_of(tl.max(size_bits(y), 0), POWER_OF_TWO)
        tl.store(q + columns, quantized(y, scale, q.dtype.element_ty), mask=columns < SIZE)
    else:
        largest = tl.zeros((TILE,), tl.int32)
        for start in range(0, SIZE, TILE):
            largest = tl.maximum(largest, size_bits(_activated(gate_up, start + columns, SIZE, ACTIVATION)))
        scale = scale_of(tl.max(largest, 0), POWER_OF_TWO)
        for start in range(0, SIZE, TILE):
            y = _activated(gate_up, start + columns, SIZE, ACTIVATION)
            tl.store(q + start + columns, quantized(y, scale, q.dtype.element_ty), mask=start + columns < SIZE)
    tl.store(scales_T1 + row, scale)


@jit(do_not_specialize=["num_tokens"])
def _silu_mul_groups_kernel(
    gate_up_T2N,
    q_TN,
    scales_TG,
    row_stride,
    num_tokens,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None]
    y = _activated(gate_up_T2N + row * row_stride, columns, SIZE, ACTIVATION)
    scales = scale_of(tl.max(size_bits(y), 1), POWER_OF_TWO)
    q = quantized(y, scales[:, None], q_TN.dtype.element_ty)
    tl.store(q_TN + row * SIZE + columns, q, mask=columns < SIZE)
    # M-major: a GEMM reads the scales of one group for all rows of its tile.
    tl.store(scales_TG + groups.to(tl.int64) * num_tokens + row, scales, mask=groups * 128 < SIZE)
