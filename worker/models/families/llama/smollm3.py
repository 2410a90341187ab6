"""Reads the fields of config.json and GGUF metadata of SmolLM3, a llama with some layers without rope."""

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
