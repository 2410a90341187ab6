"""How much queries grow with their position, in layers without rope.

Legend: T tokens, H heads, D head size.
"""

import torch

from kernels.compute_path import ComputePath
from worker.model_config import ModelConfig
from worker.workspace import Workspace


class QueryTemperature:
    """What the queries of a step are multiplied by; worker.llama4_config.TemperatureConfig has the formula."""

    def __init__(self, config: ModelConfig, path: ComputePath) -> None:
        self._config = None if config.irope is None else config.irope.temperature
        if self._config is not None:
            # A table, for what a logarithm rounds to depends on where in a tensor it is computed.
            steps = torch.arange(config.max_position_embeddings // self._config.floor_scale + 1, dtype=torch.float32)
            self._table = (1 + self._config.scale * torch.log1p(steps)).to(path.device)

    def __call__(self, positions_T: torch.Tensor, workspace: Workspace) -> torch.Tensor | None:
        """float32 [T], in the workspace; None: no layer's queries grow. positions_T: below
        max_position_embeddings."""
        if self._config is None:
            return None
        steps_T = (positions_T + 1).div_(self._config.floor_scale, rounding_mode="floor")
        out_T = workspace.take("query temperature", len(positions_T), dtype=torch.float32)
        return torch.index_select(self._table, 0, steps_T, out=out_T)


def heat_(q_THD: torch.Tensor, temperature_T: torch.Tensor) -> None:
    """Multiplies each token's queries, in place."""
    q_THD.mul_(temperature_T[:, None, None])
