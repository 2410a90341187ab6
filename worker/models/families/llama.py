"""The llama family (arXiv 2302.13971): Llama 2 and 3, SmolLM2 and SmolLM3, Mistral, Qwen2, Qwen3 dense.

They differ in what the config says: attention biases, head norms, sliding windows, rope, multipliers, tied embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import InputNorm, ResidualStream, norm_shapes
from worker.model_config import ModelConfig
from worker.models.decoder import Block, Decoder
from worker.models.family import Family, GgufFamily, experts_from_gguf
from worker.models.rope import rope_from_config_json, rope_layers
from worker.models.windows import window_of_all, windows_if_used
from worker.weights.reader import Shape, WeightReader

_ATTENTION_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


class LlamaBlock(Block):
    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        self.attention_norm = InputNorm(f"{prefix}.{_ATTENTION_NORM}", config.rms_norm_eps)
        self.attention = Attention(config, layer, f"{prefix}.self_attn", self.attention_norm, reader, backend)
        self.mlp_norm = InputNorm(f"{prefix}.{_MLP_NORM}", config.rms_norm_eps)
        self.mlp = GatedMLP(config, f"{prefix}.mlp", self.mlp_norm, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            **norm_shapes(prefix, config.hidden_size, _ATTENTION_NORM, _MLP_NORM),
        }


class LlamaModel(Decoder):
    block = LlamaBlock


def llama_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {"rope": rope_from_config_json(raw), "layer_windows": (0,) * num_layers}


def mistral_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {"rope": rope_from_config_json(raw), "layer_windows": window_of_all(raw, num_layers)}


def qwen2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qkv_bias": True,
        "attention_output_bias": False,
    }


def qwen3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qk_norm": True,
    }


def llama_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    """Files of Mixtral have the same architecture, with experts."""
    if not get("expert_count", 0):
        return config
    experts = experts_from_gguf(config, get, renormalize=True)
    return replace(config, architecture="MixtralForCausalLM", experts=experts)


def smollm3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    has_rope = rope_layers(raw, num_layers)
    if raw.get("layer_types") is None:
        # If windows are used, layers without rope have them.
        raw = {**raw, "layer_types": ["full_attention" if rope else "sliding_attention" for rope in has_rope]}
    return {
        "rope": rope_from_config_json(raw),
        "rope_layers": has_rope,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "layer_windows": windows_if_used(raw, num_layers),
    }


def smollm3_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    """GGUF files don't say which layers have no rope: llama.cpp leaves it out of every fourth one (ggml-org/llama.cpp,
    src/models/smollm3.cpp)."""
    return replace(config, rope_layers=rope_layers({}, config.num_layers))


# Files of Mixtral are a llama's with experts.
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model=LlamaModel,
    fields=llama_fields,
    gguf=GgufFamily(
        name="llama",
        architecture="LlamaForCausalLM",
        pairs_neighbours=True,
        layer_names=_MIXTRAL,
        complete=llama_from_gguf,
    ),
)
MISTRAL = Family(architectures=("MistralForCausalLM",), model=LlamaModel, fields=mistral_fields)
QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    model=LlamaModel,
    fields=qwen2_fields,
    gguf=GgufFamily(name="qwen2", architecture="Qwen2ForCausalLM"),
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    model=LlamaModel,
    fields=qwen3_fields,
    gguf=GgufFamily(name="qwen3", architecture="Qwen3ForCausalLM"),
)
SMOLLM3 = Family(
    architectures=("SmolLM3ForCausalLM",),
    model=LlamaModel,
    fields=smollm3_fields,
    gguf=GgufFamily(
        name="smollm3", architecture="SmolLM3ForCausalLM", pairs_neighbours=True, complete=smollm3_from_gguf
    ),
)
