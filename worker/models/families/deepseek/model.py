"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): multi-head latent attention, and mixtures of many small
experts with a shared one that computes every token.

V3's layers for multi-token prediction are left out; worker/models/heads/mtp.py computes them.
"""

from kernels.backend import Backend
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.layers.latent_attention import LatentAttention
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.weights.reader import Shape, WeightReader

_NAMES = ExpertNames()


class DeepseekModel(Decoder):
    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        return Block(
            LatentAttention(
                config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", reader=reader, backend=backend
            ),
            mlp_or_mixture(
                config, layer, f"{prefix}.mlp", f"{prefix}.post_attention_layernorm", _NAMES, reader, backend
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **LatentAttention.shapes(config, f"{prefix}.self_attn"),
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.mlp", _NAMES),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
        }
