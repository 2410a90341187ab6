"""FP8 GEMM as the formula: y[m, n] = sum over k of x[m, k] sx[m, k] w[n, k] sw[n, k], plus bias[n], in float64."""

import torch

from kernels.gemm.quantize.reference import GROUP, spread


def dequantized(q: torch.Tensor, scales: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """q * scales in float64. scales: a single one, one a row ([rows of q, 1]), or one per block of `rows` x 128."""
    if scales.numel() == 1:
        return q.double() * scales.double().reshape(())
    if scales.shape == (q.shape[0], 1):
        return q.double() * scales.double()
    return q.double() * spread(scales.double(), (rows, GROUP), (q.shape[0], q.shape[1]))


def fp8_gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64; scales as for kernels.gemm.fp8.dispatch.fp8_gemm."""
    y_MN = dequantized(x_MK, x_scales) @ dequantized(weight_NK, weight_scales, GROUP).t()
    return y_MN if bias_N is None else y_MN + bias_N.double()
