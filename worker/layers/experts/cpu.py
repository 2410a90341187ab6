"""Experts on a CPU.

Legend: T tokens, E hidden size, K experts of a token.
"""

from collections.abc import Sequence
from functools import partial

import torch

from kernels.backend import Backend
from kernels.elementwise.rms_norm import rms_norm
from kernels.linear import PackedLinear, PackedWeight, Stream
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.forward_context import current
from worker.layers.linear import load_linear
from worker.layers.residual import LayerOutput
from worker.model_config import ExpertsConfig
from worker.weights.reader import WeightReader


class CpuExpert:
    """down(activation(gate(h)) * up(h))."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self._gate_up, self._down = gate_up, down

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        config: ExpertsConfig,
        reader: WeightReader,
        backend: Backend,
        part: slice | None = None,
    ) -> "CpuExpert":
        """names: gate, up and down. part: this rank's part of the intermediate size; None: all."""
        gate, up, down = names
        outputs, bias = None if part is None else (lambda name: part), config.has_linear_biases
        return cls(
            load_linear(
                reader,
                [gate, up],
                bias=bias,
                backend=backend,
                gated=True,
                activation=config.activation,
                outputs=outputs,
            ),
            load_linear(reader, [down], bias=bias, backend=backend, inputs=part),
        )

    @classmethod
    def of_packed(cls, packed: Sequence[PackedWeight], backend: Backend) -> "CpuExpert":
        """packed: the `packed` of an expert on any rank, without biases and with silu."""
        gate_up, down = packed
        return cls(PackedLinear(gate_up, None, backend, gated=True), PackedLinear(down, None, backend))

    @property
    def packed(self) -> tuple[PackedWeight, PackedWeight]:
        """The packed weights of gate and up, and of down; only with C++ kernels."""
        assert self._gate_up.packed is not None
        assert self._down.packed is not None
        return self._gate_up.packed, self._down.packed

    @property
    def num_bytes(self) -> int:
        return self._gate_up.num_bytes + self._down.num_bytes

    def __call__(self, h_TE: torch.Tensor) -> torch.Tensor:
        """Computes at least one token. h and the result have the backend's compute dtype. A token's bits depend on no
        other token."""
        return self._down(self._gate_up(h_TE))


class CpuExperts:
    """Computes one expert after the other, each over the tokens routed to it. A token's results are summed in the order
    of its experts' numbers, whatever other tokens there are."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        reader: WeightReader,
        backend: Backend,
        *,
        shared: SharedExpert | None = None,
        layer: int,
    ) -> None:
        """tensors: names of each expert's gate, up and down. layer: its number, for counting experts."""
        self._norm_E, self._eps, self._dtype = norm_E, eps, backend.compute_dtype
        self._router, self._shared, self._scales_inputs = router, shared, config.scales_inputs
        self._layer = layer
        part = backend.shard.of(config.intermediate_size, "moe_intermediate_size")
        self._experts = [CpuExpert.load(names, config, reader, backend, part) for names in tensors]

    @property
    def num_bytes(self) -> int:
        held = (self._router, *self._experts)
        return sum(each.num_bytes for each in (held if self._shared is None else (*held, self._shared)))

    def __call__(self, x_TE: Stream) -> LayerOutput:
        return LayerOutput(partial(self._add_to_, x_TE))

    def _add_to_(self, x_TE: Stream, into: Stream) -> None:
        assert isinstance(x_TE, torch.Tensor)
        assert isinstance(into, torch.Tensor)
        h_TE = rms_norm(x_TE, self._norm_E, self._eps, self._dtype)
        weights_TK, experts_TK = self._router(h_TE)
        current().count_experts(self._layer, experts_TK)
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            weights_T1, h_of_expert_TE = weights_TK[tokens, places, None], h_TE[tokens]
            if self._scales_inputs:
                into[tokens] += self._experts[expert]((weights_T1 * h_of_expert_TE).to(self._dtype)).float()
            else:
                into[tokens] += weights_T1 * self._experts[expert](h_of_expert_TE).float()
        if self._shared is not None:
            self._shared.add_to_(into, h_TE)
