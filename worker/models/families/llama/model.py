"""The llama family (arXiv 2302.13971): Llama 2 and 3, SmolLM2 and SmolLM3, Mistral, Qwen2, Qwen3 dense.

They differ in what the config says: attention biases, head norms, sliding windows, rope, multipliers, tied embeddings.
"""

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.weights.reader import Shape, WeightReader


class LlamaModel(Decoder):
    @classmethod
    def block(cls, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend) -> Block:
        prefix = f"model.layers.{layer}"
        return Block(
            Attention(
                config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", reader=reader, backend=backend
            ),
            GatedMLP(
                config, f"{prefix}.mlp", norm=f"{prefix}.post_attention_layernorm", reader=reader, backend=backend
            ),
        )

    @classmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        prefix = f"model.layers.{layer}"
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            f"{prefix}.input_layernorm.weight": (config.hidden_size,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
        }
