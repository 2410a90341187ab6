"""Llama 4, its text models (meta-llama/llama-models, models/llama4; the model cards of Scout and Maverick).

iRoPE: three of four layers have rope, norms of each head without weights, and attention within chunks of positions;
each fourth sees everything, has no rope, and queries that grow with their position. Some layers, or all, have a mixture
in place of the MLP: a token's experts are those with the largest logits, each gets the token times the sigmoid of its
logit, and what they give is added to what an expert of all tokens gives.
"""

from kernels.backend import Backend
from worker.layers.experts.mixture import ExpertNames
from worker.layers.mlp import GatedMLP
from worker.model_config import ModelConfig
from worker.models.decoder import Layer
from worker.models.llama.model import linear_shapes
from worker.models.mixtral.model import MixtralModel
from worker.weights.reader import Shape, WeightReader


class Llama4Model(MixtralModel):
    """Experts have their weights one by one; worker.models.llama4.checkpoint reads them so from where they are stored
    together."""

    mixture = "feed_forward"
    names = ExpertNames(router="router", shared="shared_expert")

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        assert config.experts is not None
        if config.experts.layers[layer]:
            return super().mlp(config, layer, take, path)
        prefix = f"model.layers.{layer}"
        norm = f"{prefix}.post_attention_layernorm"
        return GatedMLP(config, f"{prefix}.feed_forward", norm=norm, take=take, path=path)

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        assert config.experts is not None
        if config.experts.layers[layer]:
            return super().mlp_shapes(config, layer)
        hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}.feed_forward"
        sizes = {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
        return linear_shapes({f"{prefix}.{name}": (*size, False) for name, size in sizes.items()})
