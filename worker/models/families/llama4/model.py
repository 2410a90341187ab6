"""Llama 4's text models (meta-llama/llama-models, models/llama4; the model cards of Scout and Maverick).

iRoPE: three of four layers have rope, norms of each head without weights, and attention within chunks of positions;
every fourth has full attention, no rope, and queries that grow with their position. Some layers, or all, have a mixture
in place of the MLP: a token's experts are those with the largest logits, each expert's input is the token times the
sigmoid of its logit, and the sum of their results is added to that of a shared expert.
"""

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.weights.reader import Shape, WeightReader

_NAMES = ExpertNames(router="router", shared="shared_expert")


class Llama4Model(Decoder):
    """Reads each expert's weights separately; where they are stored together,
    worker.models.families.llama4.checkpoint splits them."""

    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        return Block(
            Attention(
                config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", reader=reader, backend=backend
            ),
            mlp_or_mixture(
                config, layer, f"{prefix}.feed_forward", f"{prefix}.post_attention_layernorm", _NAMES, reader, backend
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.feed_forward", _NAMES),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
        }
