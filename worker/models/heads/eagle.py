"""EAGLE (arXiv 2401.15077, section 3.1): the target's features, from behind its last norm, beside embeddings.

The first layer has no norm in front of its attention, and none follows the last one: the head predicts the target's
feature at the next position, which the target's output head reads as it is.
"""

import torch

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.forward_context import TargetStates
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.mlp import GatedMLP
from worker.layers.residual import InputNorm, ResidualStream, norm_shapes
from worker.model_config import ModelConfig
from worker.models.decoder import Block
from worker.models.families.llama import LlamaBlock
from worker.models.heads.config import HeadConfig
from worker.models.heads.head import Head, side_by_side
from worker.models.heads.shared import SharedParts
from worker.weights.reader import Shape, WeightReader

_MLP_NORM = "post_attention_layernorm"


class FirstBlock(Block):
    """The first layer: a llama's without a norm in front of attention."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.attention = Attention(config, layer, f"{prefix}.self_attn", None, reader, backend)
        self.mlp_norm = InputNorm(f"{prefix}.{_MLP_NORM}", config.rms_norm_eps)
        self.mlp = GatedMLP(config, f"{prefix}.mlp", self.mlp_norm, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.attention(x)
        return x + self.mlp(self.mlp_norm(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            **norm_shapes(prefix, config.hidden_size, _MLP_NORM),
        }


class EagleHead(Head):
    def __init__(
        self, config: HeadConfig, shared: SharedParts, reader: WeightReader, backend: Backend, *, fc_bias: bool
    ) -> None:
        """fc_bias: the first heads of EAGLE's authors have one."""
        super().__init__(config, shared.embedding(backend), shared.output(None, 0.0, backend), backend)
        self._norm = shared.last_norm(backend)
        self._fc = load_linear(reader, ["fc"], bias=fc_bias, backend=backend)
        self._blocks = [
            _block_class(layer)(config.layers, layer, f"layers.{layer}", reader, backend)
            for layer in range(config.layers.num_layers)
        ]

    @staticmethod
    def shapes(config: HeadConfig, *, fc_bias: bool) -> dict[str, Shape]:
        """Returns the shapes of the checkpoint's tensors, by name."""
        size = config.hidden_size
        shapes = linear_shapes("", {"fc": (2 * size, size)}, bias=("fc",) if fc_bias else ())
        shapes = {name.removeprefix("."): shape for name, shape in shapes.items()}
        for layer in range(config.layers.num_layers):
            shapes |= _block_class(layer).shapes(config.layers, layer, f"layers.{layer}")
        return shapes

    def states_of(self, target: TargetStates) -> torch.Tensor:
        return self._norm(target.last_TE, out=torch.empty_like(target.last_TE))

    def _compute_into_(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> None:
        self._fc.add_to_(x_TE.zero_(), side_by_side("fc input", (embeddings, hidden_TE)))
        x = ResidualStream(x_TE)
        for block in self._blocks:
            x = block.forward(x)


def _block_class(layer: int) -> type[Block]:
    return LlamaBlock if layer else FirstBlock
