"""Experts on a GPU.

Legend: T tokens, E hidden size, K experts of a token, P pairs of a token and one of its experts.
"""

from collections.abc import Sequence
from functools import partial

import torch

from kernels.backend import Backend
from kernels.linear import Residual, Stream
from kernels.linear.weights import Fp8Weight, Weight, concatenate, dequantize, slice_inputs, slice_outputs
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.residual import LayerOutput
from worker.model_config import ExpertsConfig
from worker.parallel.expert_placement import ExpertPlacement
from worker.weights.reader import WeightReader


class GpuExperts:
    """Computes all experts by grouped GEMMs. With several ranks, each computes its part of every expert, or its own
    whole experts, and the results are summed over the ranks."""

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
    ) -> None:
        """tensors: names of each expert's gate, up and down; those of other ranks are not read. Experts in block-scaled
        e4m3 stay so; others get the backend's compute dtype: grouped GEMMs exist for these two."""
        from kernels.moe.gemm.triton import Experts  # imports Triton

        assert backend.gpu is not None
        self._norm_E, self._eps = norm_E, eps
        self._dtype, self._invariant = backend.compute_dtype, backend.gpu.batch_invariant
        self._router, self._shared, self._scales_inputs = router, shared, config.scales_inputs
        self._num_experts = config.num_experts
        held = range(config.num_experts)
        # Each expert's index among this rank's; -1: another rank has it. The last entry maps -1, no expert, to -1.
        self._places_N1: torch.Tensor | None = None
        part: slice | None = None
        if backend.experts.size > 1:
            held = ExpertPlacement(config.num_experts, backend.experts.size).experts_of(backend.experts.rank)
            places_N1 = torch.full((config.num_experts + 1,), -1, dtype=torch.int32)
            places_N1[held.start : held.stop] = torch.arange(len(held))
            self._places_N1 = places_N1.to(backend.device)
        elif backend.shard.size > 1:
            part = backend.shard.of(config.intermediate_size, "moe_intermediate_size")
        gate_up, down = _Stack(len(held), backend), _Stack(len(held), backend)
        biases: list[torch.Tensor] = []
        down_biases: list[torch.Tensor] = []
        for expert, names in enumerate(tensors[held.start : held.stop]):
            gate, up, below = (reader.weight(f"{name}.weight") for name in names)
            if part is not None:
                gate, up, below = slice_outputs(gate, part), slice_outputs(up, part), slice_inputs(below, part)
            gate_up.put(expert, concatenate([gate, up]))
            down.put(expert, below)
            if config.has_linear_biases:
                of_gate, of_up, of_down = (reader(f"{name}.bias") for name in names)
                own = slice(None) if part is None else part
                biases.append(torch.cat([of_gate[own], of_up[own]]))
                # One rank adds it to the sum over ranks.
                down_biases.append(of_down if part is None or backend.shard.is_first else torch.zeros_like(of_down))
        self._experts = Experts(
            gate_up_E2IH=gate_up.values,
            down_EHI=down.values,
            gate_up_scales=gate_up.scales,
            down_scales=down.scales,
            gate_up_bias_E2I=torch.stack(biases).to(backend.compute_dtype) if biases else None,
            down_bias_EH=torch.stack(down_biases).to(backend.compute_dtype) if biases else None,
            activation=config.activation,
        )

    @property
    def num_bytes(self) -> int:
        held = self._experts
        tensors = (held.gate_up_E2IH, held.down_EHI, held.gate_up_scales, held.down_scales)
        others = self._router.num_bytes + (0 if self._shared is None else self._shared.num_bytes)
        return others + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x_TE: Stream) -> LayerOutput:
        # On a GPU what is added is pending beside the stream itself.
        return LayerOutput(self._add_to_)

    def _add_to_(self, x_TE: Stream) -> None:
        assert isinstance(x_TE, Residual)
        from kernels.linear.triton import normed
        from kernels.moe.gemm.triton import run_experts

        h_TE = normed(x_TE, self._norm_E, self._eps, self._dtype)
        weights_TK, experts_TK = self._router(h_TE)
        if self._places_N1 is not None:
            experts_TK = self._places_N1[experts_TK]
        run = partial(
            run_experts, experts=self._experts, num_experts=self._num_experts, batch_invariant=self._invariant
        )
        if self._scales_inputs:
            # One row for each pair, because each of a token's experts gets a different input.
            h_PE = (h_TE[:, None] * weights_TK[:, :, None]).to(self._dtype).flatten(0, 1)
            weights_P1, experts_P1 = torch.ones_like(weights_TK).view(-1, 1), experts_TK.view(-1, 1)
            y_PE = run(h_PE, weights_TK=weights_P1, experts_TK=experts_P1)
            torch.sum(y_PE.unflatten(0, weights_TK.shape), dim=1, out=x_TE.delta_TE)
        else:
            run(h_TE, weights_TK=weights_TK, experts_TK=experts_TK, out=x_TE.delta_TE)
        x_TE.is_pending = True
        if self._shared is not None:
            self._shared.add_to_(x_TE, h_TE)


class _Stack:
    """The weights of all experts in one tensor, filled expert by expert, so that there is never a second full copy."""

    def __init__(self, num_experts: int, backend: Backend) -> None:
        self._num_experts, self._path = num_experts, backend
        self.values = torch.empty(0)
        self.scales: torch.Tensor | None = None

    def put(self, expert: int, weight: Weight) -> None:
        """Stores one expert's weight. Expert 0 comes first: it determines the shape and whether weights are e4m3."""
        blocks = weight if isinstance(weight, Fp8Weight) and weight.has_blocks else None
        values = dequantize(weight).to(self._path.compute_dtype) if blocks is None else blocks.values_OI
        if not expert:
            self.values = self._for_all(values)
            self.scales = None if blocks is None else self._for_all(blocks.scales)
        self.values[expert] = values
        if self.scales is not None:
            assert blocks is not None
            self.scales[expert] = blocks.scales

    def _for_all(self, each: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._num_experts, *each.shape), dtype=each.dtype, device=self._path.device)
