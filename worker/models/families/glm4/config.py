"""Reads the fields of config.json that are specific to GLM-4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig
from worker.models.rope import rope_dims, rope_from_config_json

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
