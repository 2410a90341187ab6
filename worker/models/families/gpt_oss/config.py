"""Reads the fields of config.json that are specific to gpt-oss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.elementwise.silu_mul.torch_cpu import SWIGLU_ALPHA, SWIGLU_LIMIT
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.family import experts_from_gguf
from worker.models.rope import rope_from_config_json
from worker.models.windows import alternating_windows

# Every other layer has a window, the first one, too.
_PERIOD, _THETA = 2, 150000.0


def gpt_oss_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    for name, expected in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if float(raw.get(name, expected)) != expected:
            raise ValueError(f"{name}={raw[name]!r} is not supported; {expected} is, as in all published models")
    size = int(raw["intermediate_size"])
    experts = ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw.get("num_experts_per_tok") or raw["experts_per_token"]),
        intermediate_size=size,
        # A softmax over the chosen experts is one over all, divided by the sum of the chosen.
        renormalize=True,
        layers=(True,) * num_layers,
        has_linear_biases=True,
        activation="clamped_swiglu",
    )
    has_biases = bool(raw.get("attention_bias", True))
    return {
        "rope": rope_from_config_json({"rope_theta": _THETA, **raw}),
        "layer_windows": alternating_windows(raw, num_layers, period=_PERIOD),
        "qkv_bias": has_biases,
        "attention_output_bias": has_biases,
        "has_sinks": True,
        "experts": experts,
    }


def gpt_oss_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    experts = replace(
        experts_from_gguf(config, get, renormalize=True), has_linear_biases=True, activation="clamped_swiglu"
    )
    window = {"sliding_window": get("attention.sliding_window")}
    return replace(
        config,
        # Files don't say that the limits of YaRN are not rounded, as config.json does.
        rope=replace(config.rope, truncate=False),
        layer_windows=alternating_windows(window, config.num_layers, period=_PERIOD),
        has_sinks=True,
        experts=experts,
    )
