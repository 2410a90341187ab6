"""Mixtures of experts in place of an MLP.

Legend: T tokens, E hidden size, F an expert's intermediate size, N experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedLinear, Residual, Stream
from kernels.linear.fp8_weight import Fp8Weight
from kernels.linear.slices import slice_inputs, slice_outputs
from kernels.linear.weights import Weight, concatenate, dequantize
from kernels.moe_routing.cpu import route
from kernels.rms_norm import rms_norm
from worker.experts_config import ExpertsConfig
from worker.layers.linear import load_linear
from worker.layers.sum_of_ranks import add_sum_of_ranks_
from worker.model_config import ModelConfig
from worker.take_tensor import TakeTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Of a mixture's tensors, below its prefix, without ".weight"."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Of one expert: gate, up, down."""
        gate, up, down = (f"experts.{expert}.{name}" for name in (self.gate, self.up, self.down))
        return gate, up, down


class MixtureOfExperts:
    """sum over a token's experts of weight * down(silu(gate(h)) * up(h)), h = norm(x), weights by softmax of router(h).
    prefix, norm: of its tensors, such as model.layers.3.mlp and model.layers.3.post_attention_layernorm."""

    def __init__(
        self, config: ModelConfig, prefix: str, norm: str, names: ExpertNames, take: TakeTensor, path: ComputePath
    ) -> None:
        experts = config.experts
        assert experts is not None
        norm_E = take(f"{norm}.weight").float().to(path.device)
        router_NE = take(f"{prefix}.{names.router}.weight")
        tensors = [[f"{prefix}.{name}" for name in names.tensors(i)] for i in range(experts.num_experts)]
        cls = CpuExperts if path.gpu is None else GpuExperts
        self._experts = cls(experts, router_NE, norm_E, config.rms_norm_eps, tensors, take, path)

    @property
    def weight_bytes(self) -> int:
        return self._experts.num_bytes

    def add_to_(self, x_TE: Stream) -> None:
        """Adds the mixture of the residual stream to it, in place."""
        self._experts.add_to_(x_TE)


class CpuExperts:
    """One expert after the other, each over the tokens that chose it. A token's sum is in the order of its experts'
    numbers, whatever other tokens there are."""

    def __init__(
        self,
        config: ExpertsConfig,
        router_NE: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        take: TakeTensor,
        path: ComputePath,
    ) -> None:
        """tensors: names of each expert's gate, up and down."""
        self._config, self._norm_E, self._eps, self._dtype = config, norm_E, eps, path.compute_dtype
        self._router = PackedLinear(router_NE, None, path)
        part = path.shard.of(config.intermediate_size, "moe_intermediate_size")
        self._gate_up = [
            load_linear(take, [gate, up], bias=False, path=path, gated=True, outputs=lambda name: part)
            for gate, up, _ in tensors
        ]
        self._down = [load_linear(take, [down], bias=False, path=path, inputs=part) for _, _, down in tensors]

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in (self._router, *self._gate_up, *self._down))

    def add_to_(self, x_TE: Stream) -> None:
        add_sum_of_ranks_(x_TE, partial(self._add_to_, x_TE))

    def _add_to_(self, x_TE: Stream, into: Stream) -> None:
        assert isinstance(x_TE, torch.Tensor)
        assert isinstance(into, torch.Tensor)
        h_TE = rms_norm(x_TE, self._norm_E, self._eps, self._dtype)
        weights_TK, experts_TK = route(
            self._router(h_TE), top_k=self._config.num_experts_per_token, renormalize=self._config.renormalize
        )
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            y_TE = self._down[expert](self._gate_up[expert](h_TE[tokens])).float()
            into[tokens] += weights_TK[tokens, places, None] * y_TE


class GpuExperts:
    """All experts by grouped GEMMs."""

    def __init__(
        self,
        config: ExpertsConfig,
        router_NE: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        tensors: Sequence[Sequence[str]],
        take: TakeTensor,
        path: ComputePath,
    ) -> None:
        """tensors: names of each expert's gate, up and down. Experts of e4m3 in blocks stay so; others are of the
        path's compute dtype: there are grouped GEMMs for these two."""
        from kernels.moe_gemm.gpu import Experts  # imports Triton

        assert path.gpu is not None
        self._config, self._norm_E, self._eps = config, norm_E, eps
        self._dtype, self._invariant = path.compute_dtype, path.gpu.batch_invariant
        self._router = PackedLinear(router_NE, None, path)
        part = path.shard.of(config.intermediate_size, "moe_intermediate_size")
        gate_up = _Stack(len(tensors), path)
        down = _Stack(len(tensors), path)
        for expert, names in enumerate(tensors):
            gate, up, below = (take.weight(f"{name}.weight") for name in names)
            if path.shard.size > 1:
                gate, up, below = slice_outputs(gate, part), slice_outputs(up, part), slice_inputs(below, part)
            gate_up.put(expert, concatenate([gate, up]))
            down.put(expert, below)
        self._experts = Experts(
            gate_up_E2IH=gate_up.values, down_EHI=down.values, gate_up_scales=gate_up.scales, down_scales=down.scales
        )

    @property
    def num_bytes(self) -> int:
        held = self._experts
        tensors = (held.gate_up_E2IH, held.down_EHI, held.gate_up_scales, held.down_scales)
        return self._router.num_bytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def add_to_(self, x_TE: Stream) -> None:
        add_sum_of_ranks_(x_TE, self._add_to_)

    def _add_to_(self, x_TE: Stream) -> None:
        assert isinstance(x_TE, Residual)
        from kernels.linear.gpu import normed
        from kernels.moe_gemm.gpu import run_experts
        from kernels.moe_routing.gpu import route as route_on_gpu

        h_TE = normed(x_TE, self._norm_E, self._eps, self._dtype)
        weights_TK, experts_TK = route_on_gpu(
            self._router(h_TE), top_k=self._config.num_experts_per_token, renormalize=self._config.renormalize
        )
        run_experts(
            h_TE, self._experts, weights_TK, experts_TK, batch_invariant=self._invariant, out=x_TE.delta_TE
        )
        x_TE.is_pending = True


class _Stack:
    """The weights of all experts in one tensor, filled one by one: no second copy of all ever exists."""

    def __init__(self, num_experts: int, path: ComputePath) -> None:
        self._num_experts, self._path = num_experts, path
        self.values = torch.empty(0)
        self.scales: torch.Tensor | None = None

    def put(self, expert: int, weight: Weight) -> None:
        """The first says the shapes, and whether they are e4m3."""
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
