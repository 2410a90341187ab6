"""Granite 3 and 4: llamas with multipliers, by which embeddings, attention, residuals and logits are scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from worker.model_config import ModelConfig
from worker.models.families.llama import LlamaModel
from worker.models.family import Family, GgufFamily
from worker.models.rope import rope_from_config_json
from worker.weights.fused_files import FusedFiles


def granite_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    multiplier = _positive(raw.get("residual_multiplier", 1.0), "residual_multiplier")
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": (0,) * num_layers,
        # Norms read a stream that is divided by the multiplier; see ModelConfig.residual_multiplier.
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)) / multiplier**2,
        "residual_multiplier": multiplier,
        "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
        "query_pre_attn_scalar": _positive(raw.get("attention_multiplier", 1.0), "attention_multiplier") ** -2,
        "logits_scaling": _positive(raw.get("logits_scaling", 1.0), "logits_scaling"),
    }


def granite_dense_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Granite 4's dense models have the config of its hybrid ones, without state-space layers and without experts."""
    types = raw.get("layer_types") or ["mamba"]
    others = sorted(set(types) - {"attention", "full_attention"})
    if others or len(types) != num_layers:
        raise ValueError(
            f"layer_types: {num_layers} of attention are expected, not {len(types)} with "
            f"{', '.join(others) or 'no other'}; state-space layers are not supported"
        )
    num_experts = raw.get("num_local_experts")
    if num_experts != 0:
        raise ValueError(f"num_local_experts={num_experts} is not supported for this architecture; 0 is")
    has_rope = raw.get("position_embedding_type") == "rope"
    return {
        **granite_fields(raw, num_layers),
        "rope_layers": (has_rope,) * num_layers,
        "intermediate_size": int(raw["shared_intermediate_size"]),
    }


def granite_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    multiplier = _positive(get("residual_scale", 1.0), "residual_scale")
    attention = get("attention.scale", 0.0)
    return replace(
        config,
        rms_norm_eps=config.rms_norm_eps / multiplier**2,
        residual_multiplier=multiplier,
        embedding_scale=float(get("embedding_scale", 1.0)),
        query_pre_attn_scalar=_positive(attention, "attention.scale") ** -2 if attention else None,
        logits_scaling=_positive(get("logit_scale", 1.0), "logit_scale"),
    )


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a number above 0")
    return float(value)


class GraniteDenseFiles(FusedFiles):
    """Reads the files of Granite 4's dense models, whose MLP has the names of a shared expert."""

    fused: ClassVar = {
        ".shared_mlp.input_linear.": (".mlp.gate_proj.", ".mlp.up_proj."),
        ".shared_mlp.output_linear.": (".mlp.down_proj.",),
    }


GRANITE = Family(
    architectures=("GraniteForCausalLM",),
    model=LlamaModel,
    fields=granite_fields,
    gguf=GgufFamily(
        name="granite", architecture="GraniteForCausalLM", pairs_neighbours=True, complete=granite_from_gguf
    ),
)
# Granite 4's dense models.
GRANITE_DENSE = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    model=LlamaModel,
    fields=granite_dense_fields,
    open_files=GraniteDenseFiles,
)
