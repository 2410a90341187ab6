"""The linear layer in plain PyTorch."""

import torch


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    y_TO = x_TI.double() @ weight_OI.double().T
    return y_TO if bias_O is None else y_TO + bias_O.double()
