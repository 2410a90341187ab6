"""Linear layers of 4-bit weights on a GPU: inputs stay as they are.

Legend: T tokens, I inputs, O outputs, E hidden size.
"""

import torch

from kernels.backend import GpuBackend
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.gemm.int4.layout import packed_for_gpu
from kernels.gemm.int4.triton import int4_gemm
from kernels.linear.residual import Residual
from kernels.linear.triton import gated, normed
from kernels.linear.weights import Int4Weight
from kernels.sampling.triton import greedy


class GpuInt4Linear:
    """PackedLinear on a GPU, for 4-bit weights. A row's result is the same in any batch."""

    __slots__ = ("_activation", "_bias_O", "_dtype", "_eps", "_gated", "_norm_I", "_weight", "num_outputs")

    def __init__(
        self,
        weight: Int4Weight,
        bias_O: torch.Tensor | None,
        norm_I: torch.Tensor | None,
        eps: float,
        *,
        gated: bool,
        activation: Activation = "silu",
        dtype: torch.dtype,
        gpu: GpuBackend,
    ) -> None:
        """dtype: that of inputs and outputs, and of weights as they are multiplied."""
        parts = (part.to(gpu.device) for part in (weight.values_OI, weight.scales_OG, weight.minima_OG))
        self._weight = packed_for_gpu(*parts, has_zeros=weight.has_zeros)
        num_rows = len(self._weight.packed_NB)
        self.num_outputs = num_rows // 2 if gated else num_rows
        self._bias_O = None if bias_O is None else bias_O.to(gpu.device, dtype).contiguous()
        self._norm_I = None if norm_I is None else norm_I.to(gpu.device)
        self._eps, self._gated, self._dtype = eps, gated, dtype
        self._activation: Activation = activation

    @property
    def packed(self) -> None:
        """Nothing is packed for the next start."""
        return None

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def __call__(self, x: torch.Tensor | Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, O] from [T, I] in the layer's dtype, or from the residual stream if there is a norm."""
        if isinstance(x, Residual):
            assert self._norm_I is not None
            x = normed(x, self._norm_I, self._eps, self._dtype)
        y_TO = int4_gemm(x, self._weight, bias_N=self._bias_O, out=None if self._gated else out)
        return gated(y_TO, self._activation, out) if self._gated else y_TO

    def add_to_(self, residual: Residual, x_TI: torch.Tensor) -> None:
        """Leaves the result pending in the residual stream."""
        assert not residual.is_pending
        self(x_TI, out=residual.delta_TE)
        residual.is_pending = True

    def argmax(
        self, x: torch.Tensor | Residual, out: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_T, values_T = greedy(self(x))
        return (ids_T.long(), values_T) if out is None else (out[0].copy_(ids_T), out[1].copy_(values_T))
