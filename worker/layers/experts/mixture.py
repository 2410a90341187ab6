"""Mixtures of experts in place of an MLP.

Legend: T tokens, E hidden size, N experts.
"""

from kernels.compute_path import ComputePath
from kernels.linear import Stream
from worker.layers.experts.cpu import CpuExperts
from worker.layers.experts.cpu_parallel import ParallelCpuExperts
from worker.layers.experts.gpu import GpuExperts
from worker.layers.experts.names import ExpertNames
from worker.layers.experts.router import Router
from worker.layers.experts.shared import SharedExpert
from worker.model_config import ModelConfig
from worker.take_tensor import TakeTensor


class MixtureOfExperts:
    """sum over a token's experts of weight * down(silu(gate(h)) * up(h)), h = norm(x), weights by router(h), or of
    down(silu(gate(weight * h)) * up(weight * h)), whichever the config says; and, if it says so, down(silu(gate(h)) *
    up(h)) of an expert of all tokens. prefix, norm: of its tensors, such as model.layers.3.mlp and
    model.layers.3.post_attention_layernorm."""

    def __init__(
        self, config: ModelConfig, prefix: str, norm: str, names: ExpertNames, take: TakeTensor, path: ComputePath
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
