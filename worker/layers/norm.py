"""RMS norms of activations that are not fused into a linear layer's input.

Legend: T tokens, N numbers in a row.
"""

from collections.abc import Callable

import torch

from kernels.backend import Backend
from kernels.elementwise.rms_norm import add_rms_norm_, rms_norm
from worker.weights.reader import WeightReader


class Norm:
    """An RMS norm. name: its tensor, such as model.layers.3.self_attn.kv_a_layernorm. reorder: moves the weights in the
    same way as the outputs of the linear layer before it."""

    def __init__(
        self,
        name: str,
        eps: float,
        reader: WeightReader,
        backend: Backend,
        *,
        reorder: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, numbers: numbers,
    ) -> None:
        self._weight_N = reorder(name, reader(f"{name}.weight").float()).contiguous().to(backend.device)
        self._eps, self._path = eps, backend

    def __call__(self, x_TN: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the norm of x_TN into `out`, contiguous, and returns it. x_TN: any strides, but 1 in the last dim."""
        if self._path.gpu is not None:
            from kernels.elementwise.rms_norm.triton import rms_norm as norm_on_gpu  # imports Triton

            return norm_on_gpu(x_TN, self._weight_N, self._eps, out=out)
        if self._path.native is not None:
            add_rms_norm_(out.zero_(), x_TN.contiguous(), self._weight_N, self._eps, self._path.native)
            return out
        return out.copy_(rms_norm(x_TN, self._weight_N, self._eps))
