"""A linear layer of its own for each head.

Legend: T tokens, H heads, I inputs and O outputs of a head.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedLinear


class HeadLinears:
    """y[t, h] = weight[h] x[t, h]."""

    def __init__(self, weight_HOI: torch.Tensor, path: ComputePath) -> None:
        """weight_HOI: of the model's dtype. On the paths whose result does not depend on the batch, heads are
        multiplied one by one, for a product of batches of matrices does."""
        self._linears: list[PackedLinear] = []
        self._weight_HIO: torch.Tensor | None = None
        if path.native is not None or (path.gpu is not None and path.gpu.batch_invariant):
            self._linears = [PackedLinear(weight_OI.contiguous(), None, path) for weight_OI in weight_HOI]
        else:
            self._weight_HIO = weight_HOI.to(path.device, path.compute_dtype).transpose(1, 2).contiguous()

    @property
    def num_bytes(self) -> int:
        if self._weight_HIO is not None:
            return self._weight_HIO.nbytes
        return sum(linear.num_bytes for linear in self._linears)

    def __call__(self, x_THI: torch.Tensor, out_THO: torch.Tensor) -> None:
        """Both of any strides."""
        if self._weight_HIO is not None:
            x_HTI = x_THI.transpose(0, 1).to(self._weight_HIO.dtype)
            out_THO.copy_(torch.bmm(x_HTI, self._weight_HIO).transpose(0, 1))
            return
        for head, linear in enumerate(self._linears):
            out_THO[:, head] = linear(x_THI[:, head].contiguous())
