"""FP8 GEMM by torch.nn.functional.scaled_mm: cuBLASLt's kernels, and CUTLASS's for scales of rows before CUDA 12.9."""

import torch
import torch.nn.functional as F

from kernels.gemm.quantize.reference import GROUP


def is_available() -> bool:
    """True if this torch has scaled_mm."""
    return torch.version.cuda is not None and hasattr(F, "scaled_mm")


def cuda_version() -> tuple[int, ...]:
    """The CUDA version that torch was built with, such as (12, 9); (0,) without CUDA."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


def scaled_mm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    blockwise: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments are those that kernels.gemm.fp8.dispatch.fp8_gemm has checked; choose.obstacle returned None. out: the
    result is written there, or copied if its rows are apart."""
    M, N = x_MK.shape[0], weight_NK.shape[0]
    if blockwise:
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        scales = x_scales, _block_scales(weight_scales)
    elif x_scales.numel() == 1 and weight_scales.numel() == 1:
        recipes = F.ScalingType.TensorWise, F.ScalingType.TensorWise
        scales = x_scales.reshape(()), weight_scales.reshape(())
    else:
        recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
        scales = x_scales.expand(M, 1).contiguous(), weight_scales.expand(N, 1).contiguous().view(1, N)
    if out is not None and out.is_contiguous():
        # F.scaled_mm without its `out`, which it lacks.
        return torch.ops.aten._scaled_mm_v2.out(
            x_MK,
            weight_NK.t(),
            [scales[0]],
            [recipes[0].value],
            [],
            [scales[1]],
            [recipes[1].value],
            [],
            bias_N,
            out_dtype,
            out=out,
        )
    y_MN = F.scaled_mm(
        x_MK, weight_NK.t(), scales[0], recipes[0], scales[1], recipes[1], bias=bias_N, output_dtype=out_dtype
    )
    return y_MN if out is None else out.copy_(y_MN)


def _block_scales(scales: torch.Tensor) -> torch.Tensor:
    """Turns [N / 128, K / 128] into [G, N / 128] with strides (1, G), where G is K / 128 rounded up to a multiple of 4:
    the layout that cuBLASLt requires. A view if rows already have stride G, as quantize_blocks makes them, else a copy.
    """
    rows, groups = scales.shape
    padded = -(-groups // 4) * 4
    if scales.stride() != (padded, 1):
        scales = F.pad(scales, (0, padded - groups))
    return scales.as_strided((padded, rows), (1, padded))


def shape_obstacle(M: int, N: int, K: int, *, blockwise: bool) -> str | None:
    """The reason why scaled_mm does not support a shape; None if it does."""
    if K % 16 or N % 16:
        return f"N={N} and K={K} have to be multiples of 16"
    if blockwise and (K % GROUP or N % GROUP):
        return f"N={N} and K={K} have to be multiples of {GROUP} with scales of blocks"
    # cuBLASLt reads a column of scales in pieces of 16 bytes.
    if blockwise and M % 4:
        return f"M={M} has to be a multiple of 4 with scales of groups"
    return None
