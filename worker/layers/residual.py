"""Adds a layer's result to the residual stream: summed over ranks, and normed in models that do so."""

from collections.abc import Callable

import torch

from kernels.backend import Backend
from kernels.elementwise.rms_norm import add_rms_norm_
from kernels.linear import Residual, Stream
from worker.layers.forward_context import current
from worker.weights.reader import WeightReader


class AddedNorm:
    """RMS norm of the sum of all ranks' parts. name: its tensor, such as model.layers.3.post_attention_layernorm."""

    def __init__(self, name: str, eps: float, reader: WeightReader, backend: Backend) -> None:
        self._weight_E = reader(f"{name}.weight").float().contiguous().to(backend.device)
        self._eps, self._kernels = eps, backend.native

    def clear_(self, part_TE: torch.Tensor) -> None:
        """On a CPU: fills part_TE with zeros; a replay of the step does so, too."""
        if self._kernels is None:
            part_TE.zero_()
        else:
            self._kernels.zero(part_TE.data_ptr(), *part_TE.shape)

    def add_to_(self, x_TE: torch.Tensor, part_TE: torch.Tensor) -> None:
        """On a CPU: adds the norm of a part to the stream, both float32."""
        add_rms_norm_(x_TE, part_TE, self._weight_E, self._eps, self._kernels)

    def norm_(self, delta_TE: torch.Tensor) -> None:
        """On a GPU: norms the stream's pending delta, in place."""
        from kernels.elementwise.rms_norm.triton import rms_norm  # imports Triton

        rms_norm(delta_TE, self._weight_E, self._eps, out=delta_TE)


def unnormed(x_TE: Stream, dtype: torch.dtype) -> torch.Tensor:
    """Returns the residual stream as input of a linear layer without a norm. On a GPU, its dtype is `dtype`, and the
    pending delta is added to the stream first."""
    if not isinstance(x_TE, Residual):
        return x_TE
    if x_TE.is_pending:
        x_TE.x_TE += x_TE.delta_TE
        x_TE.is_pending = False
    return x_TE.x_TE.to(dtype)


def add_sum_of_ranks_(x_TE: Stream, add_to_: Callable[[Stream], None], norm: AddedNorm | None = None) -> None:
    """Calls add_to_ on each rank, sums what the calls add over all ranks, norms the sum if there is a norm, and adds it
    to the residual stream, in place."""
    context = current()
    if not len(x_TE):
        return
    if context.group.size == 1 and norm is None:
        add_to_(x_TE)
    elif isinstance(x_TE, Residual):
        add_to_(x_TE)
        context.group.sum_(x_TE.delta_TE)
        if norm is not None:
            norm.norm_(x_TE.delta_TE)
    elif norm is None:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32).zero_()
        add_to_(part_TE)
        context.group.sum_(part_TE)
        x_TE += part_TE
    else:
        part_TE = context.workspace.take("part", *x_TE.shape, dtype=torch.float32)
        norm.clear_(part_TE)
        add_to_(part_TE)
        context.group.sum_(part_TE)
        norm.add_to_(x_TE, part_TE)
