"""Linear layers of floats on a GPU: cuBLAS multiplies, Triton norms before and gates after.

Legend: T tokens, I inputs, O outputs, E hidden size.
"""

import torch

from kernels.backend import GpuBackend
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.linear.residual import Residual
from kernels.linear.weights import Weight, dequantize


class GpuLinear:
    """PackedLinear on a GPU, for floats."""

    __slots__ = (
        "_activation",
        "_bias_O",
        "_eps",
        "_gated",
        "_invariant",
        "_norm_I",
        "_soft_cap",
        "_weight_OI",
        "num_outputs",
    )

    def __init__(
        self,
        weight_OI: Weight,
        bias_O: torch.Tensor | None,
        norm_I: torch.Tensor | None,
        eps: float,
        *,
        gated: bool,
        activation: Activation = "silu",
        soft_cap: float = 0.0,
        dtype: torch.dtype,
        gpu: GpuBackend,
    ) -> None:
        """dtype: that of weights, inputs and outputs."""
        self._weight_OI = dequantize(weight_OI).to(gpu.device, dtype).contiguous()
        num_rows = len(self._weight_OI)
        self.num_outputs = num_rows // 2 if gated else num_rows
        self._bias_O = None if bias_O is None else bias_O.to(gpu.device, dtype)
        self._norm_I = None if norm_I is None else norm_I.to(gpu.device)
        self._eps, self._gated, self._invariant = eps, gated, gpu.batch_invariant
        self._activation: Activation = activation
        self._soft_cap = soft_cap

    @property
    def packed(self) -> None:
        """Nothing is packed."""
        return None

    @property
    def num_bytes(self) -> int:
        return self._weight_OI.nbytes

    def __call__(self, x: torch.Tensor | Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, O] from [T, I] in the layer's dtype, or from the residual stream if there is a norm."""
        if isinstance(x, Residual):
            assert self._norm_I is not None
            x = normed(x, self._norm_I, self._eps, self._weight_OI.dtype)
        y_TO = self._multiplied(x, None if self._gated else out)
        if self._soft_cap:
            y_TO.copy_(y_TO.float().div_(self._soft_cap).tanh_().mul_(self._soft_cap))
        return gated(y_TO, self._activation, out) if self._gated else y_TO

    def add_to_(self, residual: Residual, x_TI: torch.Tensor) -> None:
        """Leaves the result pending in the residual stream."""
        assert not residual.is_pending
        self(x_TI, out=residual.delta_TE)
        residual.is_pending = True

    def argmax(
        self, x: torch.Tensor | Residual, out: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.sampling.triton import greedy

        ids_T, values_T = greedy(self(x))
        return (ids_T.long(), values_T) if out is None else (out[0].copy_(ids_T), out[1].copy_(values_T))

    def _multiplied(self, x_TI: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        from kernels.gemm.dense.triton import gemm

        return gemm(x_TI, self._weight_OI, bias_N=self._bias_O, batch_invariant=self._invariant, out=out)


def normed(residual: Residual, norm_I: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """The RMS norm of the stream, in `dtype`. Adds what is pending."""
    # Imported here, since importing Triton takes half a second, which workers on CPUs need not spend.
    from kernels.elementwise.rms_norm.triton import rms_norm

    if not residual.is_pending:
        return rms_norm(residual.x_TE, norm_I, eps, out_dtype=dtype)
    residual.is_pending = False
    return rms_norm(residual.delta_TE, norm_I, eps, residual_TN=residual.x_TE, out_dtype=dtype)


def gated(gate_up_T2O: torch.Tensor, activation: Activation, out: torch.Tensor | None) -> torch.Tensor:
    """activation(gate) * up, [T, O]."""
    from kernels.elementwise.silu_mul.triton import silu_mul

    return silu_mul(gate_up_T2O, activation=activation, out=out)
