"""Which experts compute a token.

Legend: T tokens, E hidden size, K experts of a token.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.linear import PackedLinear
from kernels.moe_routing.cpu import route
from worker.experts_config import ExpertsConfig
from worker.take_tensor import TakeTensor


class Router:
    """A linear layer, and the experts that it scores highest. Each rank of a tensor-parallel group has all of it."""

    def __init__(self, config: ExpertsConfig, name: str, take: TakeTensor, path: ComputePath) -> None:
        """name: of its tensors, without ".weight"."""
        self._config, self._on_gpu = config, path.gpu is not None
        self._linear = PackedLinear(take(f"{name}.weight"), None, path)

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes

    def __call__(self, h_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weights_TK float32 and experts_TK (int64, on a GPU int32), the best first, of normed activations in the
        path's compute dtype."""
        top_k, renormalize = self._config.num_experts_per_token, self._config.renormalize
        if not self._on_gpu:
            return route(self._linear(h_TE), top_k=top_k, renormalize=renormalize)
        from kernels.moe_routing.gpu import route as route_on_gpu  # imports Triton

        return route_on_gpu(self._linear(h_TE), top_k=top_k, renormalize=renormalize)
