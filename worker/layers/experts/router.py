"""Chooses the experts that compute a token.

Legend: T tokens, E hidden size, N experts, K experts of a token.
"""

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear
from kernels.moe.routing.torch_cpu import route
from worker.model_config import ExpertsConfig
from worker.weights.reader import WeightReader


class Router:
    """A linear layer that scores experts, and the choice of the highest scores. Each tensor-parallel rank has all of
    it."""

    def __init__(self, config: ExpertsConfig, name: str, reader: WeightReader, backend: Backend) -> None:
        """name: the prefix of its tensors, without ".weight"."""
        self._config, self._on_gpu = config, backend.gpu is not None
        bias_N = reader(f"{name}.bias") if config.has_linear_biases else None
        self._linear = PackedLinear(reader(f"{name}.weight"), bias_N, backend)
        self._bias_N = reader.float32(f"{name}.e_score_correction_bias") if config.has_bias else None

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    def __call__(self, h_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights_TK (float32) and experts_TK (int64, on a GPU int32), the best first. h_TE: normed
        activations in the backend's compute dtype."""
        if self._on_gpu:
            from kernels.moe.routing.triton import route as choose  # imports Triton
        else:
            choose = route
        config = self._config
        return choose(
            self._linear(h_TE),
            top_k=config.num_experts_per_token,
            scoring=config.scoring,
            renormalize=config.renormalize,
            bias_E=self._bias_N,
            num_groups=config.num_groups,
            top_k_groups=config.top_k_groups,
            scaling_factor=config.scaling_factor,
        )
