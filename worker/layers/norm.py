"""RMS norm with its weight."""

import torch

from kernels.rms_norm import rms_norm
from worker.take_tensor import TakeTensor


class RMSNorm:
    """Takes the float32 residual stream, gives what the next linear computes in."""

    def __init__(self, name: str, eps: float, take: TakeTensor, dtype: torch.dtype) -> None:
        self._weight = take(f"{name}.weight").float()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TE, self._weight, self._eps, self._dtype)
