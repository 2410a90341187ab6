"""A mixture of experts in place of an MLP, and the names of its tensors."""

from dataclasses import dataclass

from kernels.backend import Backend
from kernels.linear import Stream
from worker.layers.experts.cpu import CpuExperts
from worker.layers.experts.cpu_parallel import ParallelCpuExperts
from worker.layers.experts.gpu import GpuExperts
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.model_config import ModelConfig
from worker.weights.reader import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Of a mixture's tensors, below its prefix, without ".weight"."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # Of the expert of all tokens, if there is one.
    shared: str = "shared_experts"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Of one expert: gate, up, down."""
        gate, up, down = (f"experts.{expert}.{name}" for name in (self.gate, self.up, self.down))
        return gate, up, down


class MixtureOfExperts:
    """sum over a token's experts of weight * down(silu(gate(h)) * up(h)), h = norm(x), weights by router(h), or of
    down(silu(gate(weight * h)) * up(weight * h)), whichever the config says; and, if it says so, down(silu(gate(h)) *
    up(h)) of an expert of all tokens. prefix, norm: of its tensors, such as model.layers.3.mlp and
    model.layers.3.post_attention_layernorm."""

    def __init__(
        self, config: ModelConfig, prefix: str, norm: str, names: ExpertNames, take: WeightReader, path: Backend
    ) -> None:
        experts = config.experts
        assert experts is not None
        norm_E = take(f"{norm}.weight").float().to(path.device)
        router = Router(experts, f"{prefix}.{names.router}", take, path)
        tensors = [[f"{prefix}.{name}" for name in names.tensors(i)] for i in range(experts.num_experts)]
        shared = None
        if experts.shared_intermediate_size:
            shared = SharedExpert(experts.shared_intermediate_size, f"{prefix}.{names.shared}", take, path)
        arguments = experts, router, norm_E, config.rms_norm_eps, tensors, take, path
        if path.gpu is not None:
            self._experts = GpuExperts(*arguments, shared=shared)
        else:
            cls = ParallelCpuExperts if path.experts.size > 1 else CpuExperts
            self._experts = cls(*arguments, shared=shared, layer=_layer_of(prefix))

    @property
    def weight_bytes(self) -> int:
        return self._experts.num_bytes

    def add_to_(self, x_TE: Stream) -> None:
        """Adds the mixture of the residual stream to it, in place."""
        self._experts.add_to_(x_TE)


def _layer_of(prefix: str) -> int:
    return int(prefix.partition("layers.")[2].partition(".")[0])
