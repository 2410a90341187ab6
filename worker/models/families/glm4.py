"""GLM-4 of 2025 (zai-org/GLM-4-0414): a Gemma 3 block under other names. Attention and MLP norm what they read and what
they add; rope rotates half of each head; files store gate and up as one layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.families.gemma3 import Gemma3Block
from worker.models.family import Family, GgufFamily
from worker.models.rope import rope_dims, rope_from_config_json
from worker.weights.fused_files import Phi3Files


class Glm4Block(Gemma3Block):
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""

    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Glm4Model(Decoder):
    block = Glm4Block


# Rope rotates half of each head in files that don't say.
_PARTIAL_ROTARY_FACTOR = 0.5


def glm4_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_config_json(raw, is_partial=True),
        "rope_dims": rope_dims(raw, default=_PARTIAL_ROTARY_FACTOR),
        "interleaved_rope": True,
        "qkv_bias": bool(raw.get("attention_bias", True)),
        "attention_output_bias": False,
        "layer_windows": (0,) * num_layers,
    }


def glm4_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    return replace(config, interleaved_rope=True)


GLM4 = Family(
    architectures=("Glm4ForCausalLM",),
    model=Glm4Model,
    fields=glm4_fields,
    open_files=Phi3Files,
    gguf=GgufFamily(
        name="glm4",
        architecture="Glm4ForCausalLM",
        layer_names={
            "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        has_partial_rope=True,
        complete=glm4_from_gguf,
    ),
)
