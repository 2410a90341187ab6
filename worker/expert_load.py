"""How many tokens each expert of a mixture gets.

Legend: N experts.
"""

from collections.abc import Iterable

import numpy as np
import torch

from worker.experts_config import ExpertsConfig


class ExpertLoad:
    """Of each layer that has a mixture. Ranks that share experts count the tokens of all of them, each by itself."""

    def __init__(self, config: ExpertsConfig, layers: Iterable[int]) -> None:
        """layers: of this rank's stage."""
        self.num_experts = config.num_experts
        # int64, read by other threads.
        self.tokens_N = {layer: np.zeros(config.num_experts, np.int64) for layer in layers if config.layers[layer]}

    def count(self, layer: int, experts: torch.Tensor) -> None:
        """experts: int64 of any shape, that of a token and a choice in each; -1 where there is none."""
        self.tokens_N[layer] += np.bincount(experts.numpy().ravel() + 1, minlength=self.num_experts + 1)[1:]

    def clear(self) -> None:
        for tokens_N in self.tokens_N.values():
            tokens_N[:] = 0

    def imbalance(self, layer: int) -> float:
        """Tokens of the layer's busiest expert, over the mean. 1: all get as many; also before there are any."""
        tokens_N = self.tokens_N[layer]
        return float(tokens_N.max() / tokens_N.mean()) if tokens_N.any() else 1.0
