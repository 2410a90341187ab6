"""GEMM as the formula."""

import torch


def gemm(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """In float64."""
    y_MN = x_MK.double() @ weight_NK.double().t()
    return y_MN if bias_N is None else y_MN + bias_N.double()
