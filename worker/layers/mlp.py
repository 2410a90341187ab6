"""The gated MLP."""

import torch

from kernels.linear import GemmPath
from kernels.silu_mul import silu_mul
from worker.layers.linear import load_linear
from worker.model_config import ModelConfig
from worker.take_tensor import TakeTensor


class GatedMLP:
    """down(silu(gate(x)) * up(x)). `prefix` is that of its tensors, such as model.layers.3.mlp."""

    def __init__(self, config: ModelConfig, prefix: str, take: TakeTensor, path: GemmPath) -> None:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load_linear(take, names, bias=config.mlp_bias, path=path)
        self._down = load_linear(take, [f"{prefix}.down_proj"], bias=config.mlp_bias, path=path)

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self._down(silu_mul(self._gate_up(x_TE)))
