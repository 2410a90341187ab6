"""Experts on a CPU.

Legend: T tokens, E hidden size, K experts of a token.
"""

from collections.abc import Sequence
from functools import partial

import torch

from kernels.compute_path import ComputePath
from kernels.linear import Stream
from kernels.rms_norm import rms_norm
from worker.experts_config import ExpertsConfig
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.linear import load_linear
from worker.layers.sum_of_ranks import add_sum_of_ranks_
from worker.take_tensor import TakeTensor


class CpuExperts:
    """One expert after the other, each over the tokens that chose it. A token's sum is in the order of its experts'
    numbers, whatever other tokens there are."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        take: TakeTensor,
        path: ComputePath,
        *,
        shared: SharedExpert | None = None,
    ) -> None:
        """tensors: names of each expert's gate, up and down."""
        self._norm_E, self._eps, self._dtype = norm_E, eps, path.compute_dtype
        self._router, self._shared = router, shared
        part = path.shard.of(config.intermediate_size, "moe_intermediate_size")
        self._gate_up = [
            load_linear(take, [gate, up], bias=False, path=path, gated=True, outputs=lambda name: part)
            for gate, up, _ in tensors
        ]
        self._down = [load_linear(take, [down], bias=False, path=path, inputs=part) for _, _, down in tensors]

    @property
    def num_bytes(self) -> int:
        held = (self._router, *self._gate_up, *self._down)
        return sum(each.num_bytes for each in (held if self._shared is None else (*held, self._shared)))

    def add_to_(self, x_TE: Stream) -> None:
        add_sum_of_ranks_(x_TE, partial(self._add_to_, x_TE))

    def _add_to_(self, x_TE: Stream, into: Stream) -> None:
        assert isinstance(x_TE, torch.Tensor)
        assert isinstance(into, torch.Tensor)
        h_TE = rms_norm(x_TE, self._norm_E, self._eps, self._dtype)
        weights_TK, experts_TK = self._router(h_TE)
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            y_TE = self._down[expert](self._gate_up[expert](h_TE[tokens])).float()
            into[tokens] += weights_TK[tokens, places, None] * y_TE
        if self._shared is not None:
            self._shared.add_to_(into, h_TE)
