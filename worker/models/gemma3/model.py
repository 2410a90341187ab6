"""Gemma 3, its text models (arXiv 2503.19786).

Beside what the config says (gelu, scaled embeddings, windows with a rope of their own on five of six layers), attention
and MLP have a norm behind them, too, whose result is added to the residual stream.
"""

from collections.abc import Sequence

import torch

from kernels.backend import Backend
from kernels.linear.weights import PackedWeight, Weight
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import AddedNorm
from worker.model_config import ModelConfig
from worker.models.decoder import Layer
from worker.models.llama.model import LlamaModel
from worker.weights.reader import Shape, WeightReader


class Gemma3Model(LlamaModel):
    def __init__(self, config: ModelConfig, take: WeightReader, path: Backend) -> None:
        super().__init__(config, _NormsPlusOne(take) if config.norms_lack_one else take, path)

    @classmethod
    def attention(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Attention:
        prefix = f"model.layers.{layer}"
        return Attention(
            config,
            layer,
            f"{prefix}.self_attn",
            norm=f"{prefix}.input_layernorm",
            take=take,
            path=path,
            added_norm=AddedNorm(f"{prefix}.post_attention_layernorm", config.rms_norm_eps, take, path),
        )

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        prefix = f"model.layers.{layer}"
        return GatedMLP(
            config,
            f"{prefix}.mlp",
            norm=f"{prefix}.pre_feedforward_layernorm",
            take=take,
            path=path,
            added_norm=AddedNorm(f"{prefix}.post_feedforward_layernorm", config.rms_norm_eps, take, path),
        )

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        shapes = super().tensor_shapes(config)
        for layer in range(config.num_layers):
            for place in ("pre", "post"):
                shapes[f"model.layers.{layer}.{place}_feedforward_layernorm.weight"] = (config.hidden_size,)
        return shapes


class _NormsPlusOne:
    """A WeightReader over one whose norms are stored as what they differ from 1 by."""

    def __init__(self, take: WeightReader) -> None:
        self._take = take

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._take(name)
        return 1.0 + tensor.float() if name.endswith("norm.weight") else tensor

    def float32(self, name: str) -> torch.Tensor:
        return self._take.float32(name)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._take.weight(name, outputs, inputs)

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self._take.head_weight(name, outputs)

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return self._take.kv_scale(attention)

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return self._take.packed(names)

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        self._take.keep(names, packed)
