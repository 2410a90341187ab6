"""The llama family (arXiv 2302.13971): Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3 dense.

They differ in what the config says: attention biases, head norms, sliding windows, rope, tied embeddings.
Legend: T tokens of the step, E hidden size.
"""

from collections.abc import Mapping

from kernels.backend import Backend
from kernels.linear import PackedLinear, Stream
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding
from worker.layers.linear import load_head
from worker.layers.mlp import GatedMLP
from worker.layers.rotary import Rotary
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder, Layer
from worker.weights.reader import Shape, WeightReader

_EMBEDDING = "model.embed_tokens.weight"


class LlamaLayer:
    """Attention, then MLP, each of its own norm, added to the residual stream."""

    def __init__(self, attention: Layer, mlp: Layer) -> None:
        self._attention, self._mlp = attention, mlp

    @property
    def weight_bytes(self) -> int:
        return self._attention.weight_bytes + self._mlp.weight_bytes

    def add_to_(self, x_TE: Stream) -> None:
        self._attention.add_to_(x_TE)
        self._mlp.add_to_(x_TE)


class LlamaModel(Decoder):
    def __init__(self, config: ModelConfig, take: WeightReader, path: Backend) -> None:
        # Raises ValueError before anything is read.
        layers = path.stage.layers(config.num_layers)
        super().__init__(
            config,
            path,
            embed=self._load_embedding(config, take, path) if path.stage.is_first else None,
            rotary=Rotary(config.ropes, config.rope_size, path),
            layers=[
                LlamaLayer(self.attention(config, layer, take, path), self.mlp(config, layer, take, path))
                for layer in layers
            ],
            head=self._load_head(config, take, path) if path.stage.is_last else None,
        )

    @staticmethod
    def _load_embedding(config: ModelConfig, take: WeightReader, path: Backend) -> Embedding:
        return Embedding(take(_EMBEDDING), path, scale=config.embedding_scale)

    @staticmethod
    def _load_head(config: ModelConfig, take: WeightReader, path: Backend) -> PackedLinear:
        return load_head(
            take,
            _EMBEDDING if config.tie_word_embeddings else "lm_head.weight",
            path=path,
            norm="model.norm.weight",
            eps=config.rms_norm_eps,
            outputs=path.shard.covering(config.vocab_size, "vocab_size") if path.shard.size > 1 else None,
        )

    @classmethod
    def attention(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        prefix = f"model.layers.{layer}"
        return Attention(config, layer, f"{prefix}.self_attn", norm=f"{prefix}.input_layernorm", take=take, path=path)

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        prefix = f"model.layers.{layer}"
        return GatedMLP(config, f"{prefix}.mlp", norm=f"{prefix}.post_attention_layernorm", take=take, path=path)

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """The tensors that `mlp` takes, but for the norm's."""
        hidden, ffn, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}.mlp"
        sizes = {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
        return linear_shapes({f"{prefix}.{name}": (*size, config.mlp_bias) for name, size in sizes.items()})

    @classmethod
    def attention_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """The tensors that `attention` takes, but for the norms around it."""
        hidden, prefix = config.hidden_size, f"model.layers.{layer}.self_attn"
        q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        sizes = {  # inputs, outputs, bias
            "q_proj": (hidden, q, config.qkv_bias),
            "k_proj": (hidden, kv, config.qkv_bias),
            "v_proj": (hidden, kv, config.qkv_bias),
            "o_proj": (q, hidden, config.attention_output_bias),
        }
        shapes = linear_shapes({f"{prefix}.{name}": size for name, size in sizes.items()})
        if config.qk_norm:
            shapes |= {f"{prefix}.{kind}_norm.weight": (config.head_size,) for kind in "qk"}
        return shapes

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """The tensors of a checkpoint, by their Hugging Face names."""
        hidden = config.hidden_size
        shapes: dict[str, Shape] = {
            _EMBEDDING: (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for layer in range(config.num_layers):
            shapes |= cls.attention_shapes(config, layer)
            shapes |= cls.mlp_shapes(config, layer)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        return shapes


def linear_shapes(linears: Mapping[str, tuple[int, int, bool]]) -> dict[str, Shape]:
    """Of layers by name: inputs, outputs, and whether there is a bias."""
    shapes: dict[str, Shape] = {}
    for name, (inputs, outputs, bias) in linears.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    return shapes
