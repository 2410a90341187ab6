"""EAGLE-3 (arXiv 2503.01840, section 3.1): three states of the target, from low to high layers, which fc makes one.

The first layer's attention reads the normed embeddings beside the normed states, and its residual stream is the
states'. In later passes the stream itself takes the place of fc's result. The output head has a vocabulary of its own,
of the tokens that are drafted most.
"""

from dataclasses import dataclass

import torch

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding
from worker.layers.forward_context import TargetStates
from worker.layers.linear import load_head, load_linear
from worker.layers.mlp import GatedMLP
from worker.layers.norm import Norm
from worker.layers.residual import InputNorm, ResidualStream
from worker.models.families.llama import LlamaBlock
from worker.models.heads.config import HeadConfig
from worker.models.heads.head import Head, buffer_like, side_by_side
from worker.models.heads.shared import SharedParts
from worker.weights.reader import Shape, WeightReader

_NORMS = ("input_layernorm", "post_attention_layernorm")
_EMBEDDING, _NORM, _HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Stored:
    """Differences between checkpoints. first_layer: the prefix of the first layer's tensors.
    own_embedding, own_output: they hold these tensors; otherwise the head takes the target's."""

    first_layer: str = "midlayer"
    own_embedding: bool = False
    own_output: bool = True


class Eagle3Head(Head):
    def __init__(
        self,
        config: HeadConfig,
        shared: SharedParts,
        reader: WeightReader,
        backend: Backend,
        stored: Eagle3Stored,
        target_ids_V: torch.Tensor | None,
    ) -> None:
        """target_ids_V: the tokens that the output head's entries stand for; None: all, in their order."""
        layers, eps, first = config.layers, config.layers.rms_norm_eps, stored.first_layer
        embedding = Embedding(reader(_EMBEDDING), backend) if stored.own_embedding else shared.embedding(backend)
        if stored.own_output:
            output = load_head(reader, _HEAD, backend=backend, norm=_NORM, eps=eps)
        else:
            output = shared.output(reader(_NORM).float(), eps, backend)
        super().__init__(config, embedding, output, backend, target_ids_V)
        self._norm = None if config.kept_layers else shared.last_norm(backend)
        self._fc = load_linear(reader, ["fc"], bias=False, backend=backend) if config.kept_layers else None
        self._embedding_norm = Norm(f"{first}.input_layernorm", eps, reader, backend)
        self._hidden_norm = Norm(f"{first}.hidden_norm", eps, reader, backend)
        self._attention = Attention(layers, 0, f"{first}.self_attn", None, reader, backend)
        self._mlp_norm = InputNorm(f"{first}.post_attention_layernorm", eps)
        self._mlp = GatedMLP(layers, f"{first}.mlp", self._mlp_norm, reader, backend)
        self._others = [
            LlamaBlock(layers, layer, f"layers.{layer}", reader, backend) for layer in range(1, layers.num_layers)
        ]

    @staticmethod
    def shapes(config: HeadConfig, stored: Eagle3Stored) -> dict[str, Shape]:
        """Returns the shapes of the checkpoint's tensors, by name."""
        layers, size = config.layers, config.hidden_size
        shapes: dict[str, Shape] = {_NORM: (size,), f"{stored.first_layer}.hidden_norm.weight": (size,)}
        if config.kept_layers:
            shapes["fc.weight"] = size, len(config.kept_layers) * config.target.hidden_size
        if stored.own_embedding:
            shapes[_EMBEDDING] = layers.vocab_size, size
        if stored.own_output:
            shapes[_HEAD] = config.draft_vocab_size, size
        for layer in range(layers.num_layers):
            prefix = f"layers.{layer}" if layer else stored.first_layer
            shapes |= Attention.shapes(layers, f"{prefix}.self_attn") | GatedMLP.shapes(layers, f"{prefix}.mlp")
            shapes |= {f"{prefix}.{norm}.weight": (size,) for norm in _NORMS}
        for kind in "qkv":
            name = f"{stored.first_layer}.self_attn.{kind}_proj.weight"
            shapes[name] = shapes[name][0], 2 * size
        return shapes

    def states_of(self, target: TargetStates) -> torch.Tensor:
        if self._fc is None:
            assert self._norm is not None
            return self._norm(target.last_TE, out=torch.empty_like(target.last_TE))
        return self._fc(torch.cat([*target.kept], dim=1)).float()

    def _compute_into_(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> None:
        embeddings = self._embedding_norm(embeddings, out=buffer_like(embeddings, "normed embeddings"))
        normed_TE = self._hidden_norm(hidden_TE, out=buffer_like(x_TE, "normed states"))
        inputs = side_by_side("first inputs", (embeddings, normed_TE))
        x_TE.copy_(normed_TE if self.config.norm_before_residual else hidden_TE)
        x = ResidualStream(x_TE)
        x = x + self._attention(inputs)
        x = x + self._mlp(self._mlp_norm(x))
        for block in self._others:
            x = block.forward(x)
