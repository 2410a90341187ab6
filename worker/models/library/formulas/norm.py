"""RMS norms of the library, which are eight operations each. Each model has a class of its own for them, so the class's
name says nothing."""

import torch
from torch import nn

from kernels.elementwise.rms_norm import rms_norm
from kernels.native.library import NativeKernels

# Attributes by which classes of norms name their epsilon.
_EPS = ("variance_epsilon", "eps", "epsilon")
# Relative. Forms of one formula differ by a few roundings of float32; other formulas by far more.
SAME = 1e-5


class OctavoNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, weight_N: torch.Tensor, eps: float, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight_N, self.eps, self._kernels = weight_N.float().contiguous(), eps, kernels
        self._address = self.weight_N.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, x = len(self.weight_N), x.contiguous()
        assert x.dtype is torch.float32
        y = torch.zeros_like(x)
        num_rows = x.numel() // size
        self._kernels.add_rms_norm(x.data_ptr(), self._address, self.eps, num_rows, size, y.data_ptr())
        return y

    # nn.Module's own call looks for hooks, which there are none of.
    __call__ = forward


def exchanged_norm(module: nn.Module, kernels: NativeKernels) -> OctavoNorm | None:
    """Returns the norm that computes as `module`, whose weight is loaded; None if there is none."""
    parameters = dict(module.named_parameters())
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    weight_N = parameters.get("weight")
    if eps is None or weight_N is None or len(parameters) != 1 or weight_N.ndim != 1 or list(module.children()):
        return None
    size = len(weight_N)
    # Rows of different sizes, so that eps has a part in some, and not of mean 0.
    generator = torch.Generator().manual_seed(0)
    x_TN = torch.randn(6, size, generator=generator) + 0.3
    x_TN *= torch.tensor([1e-4, 1e-2, 1.0, 30.0, eps**0.5, 1e3])[:, None]
    try:
        expected_TN = module(x_TN)
    except Exception:  # noqa: BLE001 - a module that takes other inputs may raise anything
        return None
    if not isinstance(expected_TN, torch.Tensor) or expected_TN.shape != x_TN.shape:
        return None
    for candidate_N in (weight_N, 1 + weight_N):
        formula_TN = rms_norm(x_TN, candidate_N.float(), eps)
        if bool(((expected_TN - formula_TN).abs() <= SAME * formula_TN.abs().amax(1, keepdim=True)).all()):
            return OctavoNorm(candidate_N, eps, kernels)
    return None


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if x is y but for roundings."""
    return x.shape == y.shape and bool(((x - y).abs() <= SAME * y.abs().amax()).all())
