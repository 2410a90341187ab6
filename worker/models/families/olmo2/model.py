"""OLMo 2 (arXiv 2501.00656) and 3: attention and MLP norm what they add to the residual stream, not what they read
from it; all heads of q share one norm, and so do all heads of k."""

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import AddedNorm
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.weights.reader import Shape, WeightReader

_AFTER_ATTENTION, _AFTER_MLP = "post_attention_layernorm", "post_feedforward_layernorm"


class Olmo2Model(Decoder):
    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix, eps = f"model.layers.{layer}", config.rms_norm_eps
        return Block(
            Attention(
                config,
                layer,
                f"{prefix}.self_attn",
                norm=None,
                reader=reader,
                backend=backend,
                added_norm=AddedNorm(f"{prefix}.{_AFTER_ATTENTION}", eps, reader, backend),
            ),
            GatedMLP(
                config,
                f"{prefix}.mlp",
                norm=None,
                reader=reader,
                backend=backend,
                added_norm=AddedNorm(f"{prefix}.{_AFTER_MLP}", eps, reader, backend),
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            f"{prefix}.{_AFTER_ATTENTION}.weight": (config.hidden_size,),
            f"{prefix}.{_AFTER_MLP}.weight": (config.hidden_size,),
        }
