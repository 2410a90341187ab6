"""A mixture of experts in place of an MLP, and the names of its tensors."""

from dataclasses import dataclass

from kernels.backend import Backend
from worker.layers.experts.cpu import CpuExperts
from worker.layers.experts.cpu_parallel import ParallelCpuExperts
from worker.layers.experts.gpu import GpuExperts
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.layers.linear import linear_shapes
from worker.layers.mlp import GatedMLP, gated_linears
from worker.layers.residual import InputNorm, Layer, LayerInput, LayerOutput, stream_for
from worker.model_config import ModelConfig
from worker.weights.reader import Shape, WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a mixture's tensors, below its prefix, without ".weight"."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # The shared expert, if there is one.
    shared: str = "shared_experts"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Returns the names of one expert's gate, up and down."""
        gate, up, down = (f"experts.{expert}.{name}" for name in (self.gate, self.up, self.down))
        return gate, up, down


class MixtureOfExperts(Layer):
    """The sum over a token's experts of weight * down(silu(gate(h)) * up(h)), with weights from router(h), or, with
    config.experts.scales_inputs, of down(silu(gate(weight * h)) * up(weight * h)); plus down(silu(gate(h)) * up(h)) of
    the shared expert, if there is one. config.experts may name another activation. prefix: of its tensors, such as
    model.layers.3.mlp. norm: the one that h comes from."""

    def __init__(
        self,
        config: ModelConfig,
        prefix: str,
        norm: InputNorm,
        names: ExpertNames,
        reader: WeightReader,
        backend: Backend,
    ) -> None:
        experts = config.experts
        assert experts is not None
        self._norm = norm
        norm_E = reader(f"{norm.name}.weight").float().to(backend.device)
        router = Router(experts, f"{prefix}.{names.router}", reader, backend)
        tensors = [[f"{prefix}.{name}" for name in names.tensors(i)] for i in range(experts.num_experts)]
        shared = None
        if experts.shared_intermediate_size:
            shared = SharedExpert(
                experts.shared_intermediate_size,
                f"{prefix}.{names.shared}",
                reader,
                backend,
                has_gate=experts.has_shared_gate,
            )
        arguments = experts, router, norm_E, config.rms_norm_eps, tensors, reader, backend
        if backend.gpu is not None:
            self._experts = GpuExperts(*arguments, shared=shared)
        else:
            cls = ParallelCpuExperts if backend.experts.size > 1 else CpuExperts
            self._experts = cls(*arguments, shared=shared, layer=_layer_of(prefix))

    @staticmethod
    def shapes(config: ModelConfig, prefix: str, names: ExpertNames) -> dict[str, Shape]:
        """Returns the shapes of the tensors under the prefix, by name."""
        experts, hidden_size = config.experts, config.hidden_size
        assert experts is not None
        linears = {names.router: (hidden_size, experts.num_experts)}
        sizes = gated_linears(hidden_size, experts.intermediate_size).values()
        for expert in range(experts.num_experts):
            linears |= dict(zip(names.tensors(expert), sizes, strict=True))
        if ffn := experts.shared_intermediate_size:
            linears |= {f"{names.shared}.{name}": size for name, size in gated_linears(hidden_size, ffn).items()}
        if experts.has_shared_gate:
            linears[f"{names.shared}_gate"] = (hidden_size, 1)
        shapes = linear_shapes(prefix, linears, bias=linears if experts.has_linear_biases else ())
        if experts.has_bias:
            shapes[f"{prefix}.{names.router}.e_score_correction_bias"] = (experts.num_experts,)
        return shapes

    @property
    def weight_bytes(self) -> int:
        return self._experts.num_bytes

    def __call__(self, h: LayerInput, /) -> LayerOutput:
        return self._experts(stream_for(h, self._norm))


def mlp_or_mixture(
    config: ModelConfig,
    layer: int,
    prefix: str,
    norm: InputNorm,
    names: ExpertNames,
    reader: WeightReader,
    backend: Backend,
) -> GatedMLP | MixtureOfExperts:
    """Makes a mixture in the layers that config.experts names, an MLP in others."""
    assert config.experts is not None
    if config.experts.layers[layer]:
        return MixtureOfExperts(config, prefix, norm, names, reader, backend)
    return GatedMLP(config, prefix, norm, reader, backend)


def mlp_or_mixture_shapes(config: ModelConfig, layer: int, prefix: str, names: ExpertNames) -> dict[str, Shape]:
    """Returns the shapes of the tensors under the prefix, by name."""
    assert config.experts is not None
    has_mixture = config.experts.layers[layer]
    return MixtureOfExperts.shapes(config, prefix, names) if has_mixture else GatedMLP.shapes(config, prefix)


def _layer_of(prefix: str) -> int:
    return int(prefix.partition("layers.")[2].partition(".")[0])
