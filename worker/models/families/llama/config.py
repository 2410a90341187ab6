"""Reads the fields of config.json that are specific to the llama family: rope, sliding windows, and the head norms and
biases of Qwen's models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig
from worker.models.family import experts_from_gguf
from worker.models.rope import rope_from_config_json
from worker.models.windows import window_of_all, windows_if_used


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
