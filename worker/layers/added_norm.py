"""The norm that an attention's or an MLP's result goes through before it is added to the residual stream.

Legend: T tokens, E hidden size.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.rms_norm import add_rms_norm_
from worker.take_tensor import TakeTensor


class AddedNorm:
    """RMS norm of the sum of all ranks' parts. name: of its tensor, such as
    model.layers.3.post_attention_layernorm."""

    def __init__(self, name: str, eps: float, take: TakeTensor, path: ComputePath) -> None:
        self._weight_E = take(f"{name}.weight").float().contiguous().to(path.device)
        self._eps, self._kernels = eps, path.native

    def clear_(self, part_TE: torch.Tensor) -> None:
        """On a CPU: makes zeros of it, also when a step is replayed."""
        if self._kernels is None:
            part_TE.zero_()
        else:
            self._kernels.zero(part_TE.data_ptr(), *part_TE.shape)

    def add_to_(self, x_TE: torch.Tensor, part_TE: torch.Tensor) -> None:
        """On a CPU: adds the norm of a part to the stream, both float32."""
        add_rms_norm_(x_TE, part_TE, self._weight_E, self._eps, self._kernels)

    def norm_(self, delta_TE: torch.Tensor) -> None:
        """On a GPU: of what the stream has pending, in place."""
        from kernels.rms_norm.gpu import rms_norm  # imports Triton

        rms_norm(delta_TE, self._weight_E, self._eps, out=delta_TE)
