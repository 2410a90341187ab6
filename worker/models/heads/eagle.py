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
from worker.models.decoder import Block
from worker.models.heads.config import HeadConfig
from worker.models.heads.head import Head, side_by_side
from worker.models.heads.shared import SharedParts
from worker.weights.reader import Shape, WeightReader


class EagleHead(Head):
    def __init__(
        self, config: HeadConfig, shared: SharedParts, reader: WeightReader, backend: Backend, *, fc_bias: bool
    ) -> None:
        """fc_bias: the first heads of EAGLE's authors have one."""
        super().__init__(config, shared.embedding(backend), shared.output(None, 0.0, backend), backend)
        self._norm = shared.last_norm(backend)
        self._fc = load_linear(reader, ["fc"], bias=fc_bias, backend=backend)
        self._layers = [_block(config, layer, reader, backend) for layer in range(config.layers.num_layers)]

    @staticmethod
    def shapes(config: HeadConfig, *, fc_bias: bool) -> dict[str, Shape]:
        """Returns the shapes of the checkpoint's tensors, by name."""
        size = config.hidden_size
        shapes = linear_shapes("", {"fc": (2 * size, size)}, bias=("fc",) if fc_bias else ())
        shapes = {name.removeprefix("."): shape for name, shape in shapes.items()}
        for layer in range(config.layers.num_layers):
            prefix = f"layers.{layer}"
            shapes |= Attention.shapes(config.layers, f"{prefix}.self_attn")
            shapes |= GatedMLP.shapes(config.layers, f"{prefix}.mlp")
            norms = ("post_attention_layernorm",) if layer == 0 else ("input_layernorm", "post_attention_layernorm")
            shapes |= {f"{prefix}.{norm}.weight": (size,) for norm in norms}
        return shapes

    def states_of(self, target: TargetStates) -> torch.Tensor:
        return self._norm(target.last_TE, out=torch.empty_like(target.last_TE))

    def _compute_into_(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> None:
        self._fc.add_to_(x_TE.zero_(), side_by_side("fc input", (embeddings, hidden_TE)))
        for layer in self._layers:
            layer.add_to_(x_TE)


def _block(config: HeadConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
    prefix = f"layers.{layer}"
    norm = f"{prefix}.input_layernorm" if layer else None
    return Block(
        Attention(config.layers, layer, f"{prefix}.self_attn", norm=norm, reader=reader, backend=backend),
        GatedMLP(config.layers, f"{prefix}.mlp", f"{prefix}.post_attention_layernorm", reader, backend),
    )
