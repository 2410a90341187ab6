"""GEMM with 4-bit weights in plain PyTorch."""

import torch

from kernels.gemm.int4.layout import GROUP, GpuInt4


def weights(weight: GpuInt4, dtype: torch.dtype) -> torch.Tensor:
    """Returns [N, K] in dtype, as tiles are multiplied: computed in float32, rounded once."""
    spans_NSB = weight.packed_NB.unflatten(1, (-1, GROUP))
    values_NK = torch.stack((spans_NSB & 15, spans_NSB >> 4), dim=2).flatten(1)[:, : weight.num_inputs].float()
    scales_NSG2 = weight.scales_SN.t().contiguous()[..., None].view(torch.float16).unflatten(2, (2, 2))
    scales_NK, minima_NK = (
        numbers_NSG.float().flatten(1).repeat_interleave(GROUP, dim=1)[:, : weight.num_inputs]
        for numbers_NSG in scales_NSG2.unbind(3)
    )
    if weight.has_zeros:
        return ((values_NK - minima_NK) * scales_NK).to(dtype)
    return (values_NK * scales_NK + minima_NK).to(dtype)


def int4_gemm(x_MK: torch.Tensor, weight: GpuInt4, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """In float64."""
    y_MN = x_MK.double() @ weights(weight, x_MK.dtype).double().t()
    return y_MN if bias_N is None else y_MN + bias_N.double()
