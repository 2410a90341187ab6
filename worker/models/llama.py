"""The llama family (arXiv 2302.13971): Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3 dense.

They differ in what the config says: attention biases, head norms, sliding windows, rope, tied embeddings.
Legend: T tokens of the step, E hidden size.
"""

from kernels.compute_path import ComputePath
from kernels.linear import Stream
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding
from worker.layers.linear import load_head
from worker.layers.mlp import GatedMLP
from worker.layers.rotary import Rotary
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.take_tensor import Shape, TakeTensor


class LlamaLayer:
    def __init__(self, config: ModelConfig, layer: int, take: TakeTensor, path: ComputePath) -> None:
        prefix = f"model.layers.{layer}"
        self._attention = Attention(
            config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", take=take, path=path
        )
        self._mlp = GatedMLP(config, f"{prefix}.mlp", norm=f"{prefix}.post_attention_layernorm", take=take, path=path)

    @property
    def weight_bytes(self) -> int:
        return self._attention.weight_bytes + self._mlp.weight_bytes

    def add_to_(self, x_TE: Stream) -> None:
        """Adds attention, then MLP, each of its own norm, to the residual stream, in place."""
        self._attention.add_to_(x_TE)
        self._mlp.add_to_(x_TE)


class LlamaModel(Decoder):
    def __init__(self, config: ModelConfig, take: TakeTensor, path: ComputePath) -> None:
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        super().__init__(
            config,
            path,
            embed=Embedding(take("model.embed_tokens.weight"), path),
            rotary=Rotary(config.rope, config.head_size, path),
            layers=[LlamaLayer(config, layer, take, path) for layer in range(config.num_layers)],
            head=load_head(take, head, path=path, norm="model.norm.weight", eps=config.rms_norm_eps),
        )

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
        """The tensors of a checkpoint, by their Hugging Face names."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        linears = {  # name: inputs, outputs, bias
            "self_attn.q_proj": (hidden, q, config.qkv_bias),
            "self_attn.k_proj": (hidden, kv, config.qkv_bias),
            "self_attn.v_proj": (hidden, kv, config.qkv_bias),
            "self_attn.o_proj": (q, hidden, config.attention_output_bias),
            "mlp.gate_proj": (hidden, ffn, config.mlp_bias),
            "mlp.up_proj": (hidden, ffn, config.mlp_bias),
            "mlp.down_proj": (ffn, hidden, config.mlp_bias),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config.qk_norm:
            norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}

        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for prefix in (f"model.layers.{layer}" for layer in range(config.num_layers)):
            for name, (inputs, outputs, bias) in linears.items():
                shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
                if bias:
                    shapes[f"{prefix}.{name}.bias"] = (outputs,)
            for name, size in norms.items():
                shapes[f"{prefix}.{name}.weight"] = (size,)
        return shapes
