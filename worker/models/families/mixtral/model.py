"""The llama family with mixtures of experts: Mixtral (arXiv 2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv
2505.09388)."""

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.experts.mixture import ExpertNames, mlp_or_mixture, mlp_or_mixture_shapes
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.weights.reader import Shape, WeightReader


class MixtralModel(Decoder):
    """A llama with a mixture in the layers that config.experts names, and an MLP in others."""

    mlp = "block_sparse_moe"
    names = ExpertNames(gate="w1", up="w3", down="w2")

    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        return Block(
            Attention(
                config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", reader=reader, backend=backend
            ),
            mlp_or_mixture(
                config, layer, f"{prefix}.{cls.mlp}", f"{prefix}.post_attention_layernorm", cls.names, reader, backend
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **mlp_or_mixture_shapes(config, layer, f"{prefix}.{cls.mlp}", cls.names),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
        }


class Qwen3MoeModel(MixtralModel):
    mlp = "mlp"
    names = ExpertNames()


class Qwen2MoeModel(MixtralModel):
    mlp = "mlp"
    names = ExpertNames(shared="shared_expert")
