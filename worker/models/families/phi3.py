"""Phi-3 and Phi-4: a llama whose files store q, k and v as one layer, and gate and up as another."""

from collections.abc import Mapping
from typing import Any

from worker.model_config import ModelConfig
from worker.models.families.llama import LlamaModel
from worker.models.family import Family, GgufFamily
from worker.models.rope import rope_dims, rope_from_config_json, rope_settings
from worker.models.windows import window_of_all
from worker.weights.fused_files import Phi3Files

# Names of longrope; older files have the first two.
_LONGROPE = ("su", "yarn", "longrope")


def phi3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    settings = rope_settings(raw)
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in ("default", *_LONGROPE):
        raise ValueError(f"rope_type={scaling!r} is not supported for Phi-3; default and longrope are")
    if scaling in _LONGROPE:
        raw = {**raw, "rope_parameters": {**settings, "rope_type": "longrope"}, "rope_scaling": None}
    return {
        "rope": rope_from_config_json(raw, is_partial=True),
        "rope_dims": rope_dims(raw),
        "layer_windows": window_of_all(raw, num_layers),
    }


def phi3_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    if get("rope.scaling.attn_factor", None) is not None:
        raise ValueError("longrope (rope.scaling.attn_factor) is not supported in GGUF files: use the safetensors")
    return config


PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    model=LlamaModel,
    fields=phi3_fields,
    open_files=Phi3Files,
    gguf=GgufFamily(
        name="phi3",
        architecture="Phi3ForCausalLM",
        layer_names={
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
        },
        has_partial_rope=True,
        complete=phi3_from_gguf,
    ),
)
