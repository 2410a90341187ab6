"""Reads the fields of config.json and GGUF metadata of models that compute as a llama and say more in their configs:
Granite 3 and 4 (multipliers), SmolLM3 (layers without rope)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig
from worker.models.rope import rope_from_config_json, rope_layers
from worker.models.windows import windows_if_used


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
