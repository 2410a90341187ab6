"""Gemma 3's text models (arXiv 2503.19786), and Gemma 2 (arXiv 2408.00118).

In addition to what the config says (gelu, scaled embeddings, windows with a rope of their own on five of six layers),
the results of attention and MLP are normed before they are added to the residual stream.
"""

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import AddedNorm
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.models.families.gemma3.checkpoint import NormsPlusOne
from worker.weights.reader import Shape, WeightReader


class Gemma3Model(Decoder):
    # Before and after attention, before and after the MLP.
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    @classmethod
    def adapted(cls, config: ModelConfig, reader: WeightReader) -> WeightReader:
        return NormsPlusOne(reader) if config.norms_lack_one else reader

    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        before_attention, after_attention, before_mlp, after_mlp = (f"{prefix}.{name}" for name in cls.norms)
        return Block(
            Attention(
                config,
                layer,
                f"{prefix}.self_attn",
                norm=before_attention,
                reader=reader,
                backend=backend,
                added_norm=AddedNorm(after_attention, config.rms_norm_eps, reader, backend),
            ),
            GatedMLP(
                config,
                f"{prefix}.mlp",
                norm=before_mlp,
                reader=reader,
                backend=backend,
                added_norm=AddedNorm(after_mlp, config.rms_norm_eps, reader, backend),
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            **{f"{prefix}.{norm}.weight": (config.hidden_size,) for norm in cls.norms},
        }
