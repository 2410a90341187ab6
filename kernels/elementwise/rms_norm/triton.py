"""RMS norm on a GPU, optionally with the residual's addition before it and quantization to e4m3 after it.

All functions: x_TN is fp32, bf16 or fp16, contiguous in the last dim, N up to 32768; computed in float32. weight_N: any
float dtype, contiguous. residual_TN, if given: any float dtype, contiguous in the last dim; it becomes residual + x,
rounded to its dtype, and that sum is normed. out_dtype: the norm is rounded to it: fp32, bf16 or fp16; None means x's.
Quantization is that of kernels.gemm.quantize, applied to the rounded norm. So each fused function equals its parts in
sequence, and a float32 stream's norm is the same whether x is added in the same call or earlier.

Legend: T tokens, N numbers of a row, G = ceil(N / 128).
"""

import torch
import triton.language as tl

from kernels.gemm.quantize.checks import check_device
from kernels.gemm.quantize.triton import quantized, scale_of, size_bits
from kernels.triton_common.integers import cdiv, next_power_of_2
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import narrow, widen

GROUP = 128
# A row stays in registers between its sum and its output, so a program has it whole: at 16 warps 64 numbers a thread.
_MAX_SIZE = 32768
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NOT_QUANTIZED, _BY_TOKEN, _BY_GROUP = (tl.constexpr(i) for i in range(3))


def rms_norm(
    x_TN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    *,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, [T, N] in out_dtype; x is unchanged.

    out: memory for the result, contiguous in the last dim; it may be x itself. Raises ValueError for tensors and dtypes
    that differ from the above.
    """
    out_dtype = out_dtype or x_TN.dtype
    if out is None:
        out = torch.empty(x_TN.shape, dtype=out_dtype, device=x_TN.device)
    elif out.shape != x_TN.shape or out.dtype is not out_dtype or out.stride(1) != 1:
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: {tuple(x_TN.shape)} of "
            f"{out_dtype}, contiguous in the last dim, is expected"
        )
    _launch(x_TN, weight_N, eps, residual_TN, out_dtype, out, None, _NOT_QUANTIZED, False)
    return out


def rms_norm_quantize_tokens(
    x_TN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    *,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_TN of float8_e4m3fn, scales_T1 float32): kernels.gemm.quantize.triton.quantize_tokens of `rms_norm`.

    Raises ValueError for tensors and dtypes that differ from the above, or a GPU without e4m3 (before sm_89).
    """
    check_device(x_TN.device)
    q_TN = torch.empty(x_TN.shape, dtype=torch.float8_e4m3fn, device=x_TN.device)
    scales_T1 = torch.empty(len(x_TN), 1, dtype=torch.float32, device=x_TN.device)
    _launch(x_TN, weight_N, eps, residual_TN, out_dtype, q_TN, scales_T1, _BY_TOKEN, power_of_two)
    return q_TN, scales_T1


def rms_norm_quantize_groups(
    x_TN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    *,
    residual_TN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q_TN of float8_e4m3fn, scales_TG float32): kernels.gemm.quantize.triton.quantize_groups of `rms_norm`,
    with a scale for each 128 columns, of strides (1, T).

    Errors as in `rms_norm_quantize_tokens`.
    """
    check_device(x_TN.device)
    q_TN = torch.empty(x_TN.shape, dtype=torch.float8_e4m3fn, device=x_TN.device)
    num_groups = cdiv(x_TN.shape[1], GROUP)
    scales_TG = torch.empty(num_groups, len(x_TN), dtype=torch.float32, device=x_TN.device).t()
    _launch(x_TN, weight_N, eps, residual_TN, out_dtype, q_TN, scales_TG, _BY_GROUP, power_of_two)
    return q_TN, scales_TG


def tile_of(size: int) -> tuple[int, int]:
    """(groups of 128 columns, a power of two; warps) of a row's program. They depend on the row's size alone, so that
    the order of its sum does not depend on the batch. 16 numbers a thread are two 16-byte vectors of bf16 in
    flight."""
    groups = next_power_of_2(cdiv(size, GROUP))
    return groups, min(16, max(1, groups * GROUP // 512))


def _launch(
    x_TN: torch.Tensor,
    weight_N: torch.Tensor,
    eps: float,
    residual_TN: torch.Tensor | None,
    norm_dtype: torch.dtype | None,
    out_TN: torch.Tensor,
    scales: torch.Tensor | None,
    quantization: tl.constexpr,
    power_of_two: bool,
) -> None:
    if x_TN.dim() != 2 or x_TN.stride(1) != 1 or not 0 < x_TN.shape[1] <= _MAX_SIZE:
        raise ValueError(
            f"x of shape {tuple(x_TN.shape)}, strides {x_TN.stride()}: must be a matrix of 1 to {_MAX_SIZE} columns, "
            "contiguous in the last dim"
        )
    if weight_N.shape != x_TN.shape[1:] or weight_N.stride(0) != 1:
        raise ValueError(f"weight of shape {tuple(weight_N.shape)}: a row of x has {x_TN.shape[1]} numbers")
    norm_dtype = norm_dtype or x_TN.dtype
    if norm_dtype not in _TRITON_DTYPES:
        raise ValueError(f"out_dtype {norm_dtype}: a norm is rounded to one of {', '.join(map(str, _TRITON_DTYPES))}")
    if residual_TN is not None and (residual_TN.shape != x_TN.shape or residual_TN.stride(1) != 1):
        raise ValueError(
            f"residual of shape {tuple(residual_TN.shape)}, strides {residual_TN.stride()}: {tuple(x_TN.shape)}, "
            "contiguous in the last dim, is expected"
        )
    if not len(x_TN):
        return
    groups, num_warps = tile_of(x_TN.shape[1])
    _rms_norm_kernel[(len(x_TN),)](
        x_TN,
        residual_TN,
        weight_N,
        out_TN,
        scales,
        eps,
        len(x_TN),
        x_TN.stride(0),
        0 if residual_TN is None else residual_TN.stride(0),
        out_TN.stride(0),
        SIZE=x_TN.shape[1],
        NORM_DTYPE=_TRITON_DTYPES[norm_dtype],
        QUANTIZATION=quantization.value,
        POWER_OF_TWO=power_of_two,
        GROUPS=groups,
        num_warps=num_warps,
    )


@jit(do_not_specialize=["num_tokens"])
def _rms_norm_kernel(
    x_TN,
    residual_TN,
    weight_N,
    out_TN,
    scales,
    eps,
    num_tokens,
    x_stride,
    residual_stride,
    out_stride,
    SIZE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Norms one row as [groups, 128], the shape of scales; without quantization too, so that sums have one order."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None]
    mask = columns < SIZE
    x = widen(tl.load(x_TN + row * x_stride + columns, mask=mask, other=0.0))
    weight = widen(tl.load(weight_N + columns, mask=mask, other=0.0))
    if residual_TN is not None:
        residual_ptrs = residual_TN + row * residual_stride + columns
        total = narrow(x + widen(tl.load(residual_ptrs, mask=mask, other=0.0)), residual_TN.dtype.element_ty)
        tl.store(residual_ptrs, total, mask=mask)
        x = widen(total)
    mean_square = tl.sum(tl.sum(x * x, 1), 0) / SIZE
    y = narrow(x * tl.rsqrt(mean_square + eps) * weight, NORM_DTYPE)
    out_ptrs = out_TN + row * out_stride + columns
    out_dtype: tl.constexpr = out_TN.dtype.element_ty
    if QUANTIZATION == _NOT_QUANTIZED:
        tl.store(out_ptrs, y, mask=mask)
    elif QUANTIZATION == _BY_TOKEN:
        y = widen(y)
        scale = scale_of(tl.max(tl.max(size_bits(y), 1), 0), POWER_OF_TWO)
        tl.store(out_ptrs, quantized(y, scale, out_dtype), mask=mask)
        tl.store(scales + row, scale)
    else:
        y = widen(y)
        scale = scale_of(tl.max(size_bits(y), 1), POWER_OF_TWO)
        tl.store(out_ptrs, quantized(y, scale[:, None], out_dtype), mask=mask)
        # M-major: a GEMM reads the scales of one group for all rows of its tile.
        tl.store(scales + groups.to(tl.int64) * num_tokens + row, scale, mask=groups * 128 < SIZE)
