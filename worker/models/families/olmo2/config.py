"""Reads the fields of config.json that are specific to OLMo 2 and OLMo 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig, RopeConfig
from worker.models.rope import rope_from_config_json, ropes_by_type
from worker.models.windows import alternating_windows, windows_by_type

# Three of four layers have a window, and a rope of their own without scaling.
_PERIOD, _THETA = 4, 500000.0


def olmo2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {"rope": rope_from_config_json(raw), "layer_windows": (0,) * num_layers, "projection_norm": True}


def olmo3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    rope, local_rope = ropes_by_type(raw, _THETA, raw.get("rope_theta", _THETA))
    return {
        "rope": rope,
        "local_rope": local_rope,
        "layer_windows": alternating_windows(raw, num_layers, period=_PERIOD),
        "projection_norm": True,
    }


def olmo2_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    """Files of OLMo 3 have the same architecture, with a window and a list that is true for layers with it."""
    config = replace(config, qk_norm=False, projection_norm=True)
    window, pattern = get("attention.sliding_window", 0), get("attention.sliding_window_pattern", None)
    if not window:
        return config
    if pattern is None:
        windows = alternating_windows({"sliding_window": window}, config.num_layers, period=_PERIOD)
    else:
        types = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
        windows = windows_by_type(int(window), types, config.num_layers)
    return replace(config, layer_windows=windows, local_rope=RopeConfig(theta=config.rope.theta))
