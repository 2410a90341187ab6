"""Reads the config.json fields that are specific to Mixtral, Qwen2-MoE and Qwen3-MoE: those of the dense models, and
experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.family import experts_from_gguf
from worker.models.rope import rope_from_config_json
from worker.models.windows import window_of_all, windows_if_used


def mixtral_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["intermediate_size"]),
        renormalize=True,
        layers=(True,) * num_layers,
    )
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": window_of_all(raw, num_layers),
        "experts": experts,
    }


def qwen2_moe_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    experts = replace(
        qwen_experts(raw, num_layers),
        shared_intermediate_size=int(raw["shared_expert_intermediate_size"]),
        has_shared_gate=True,
    )
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "attention_output_bias": False,
        "experts": experts,
    }


def qwen3_moe_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_config_json(raw),
        "layer_windows": windows_if_used(raw, num_layers),
        "qk_norm": True,
        "experts": qwen_experts(raw, num_layers),
    }


def qwen2_moe_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    experts = experts_from_gguf(config, get, renormalize=False)
    shared = int(get("expert_shared_feed_forward_length"))
    return replace(config, experts=replace(experts, shared_intermediate_size=shared, has_shared_gate=True))


def qwen3_moe_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    return replace(config, experts=experts_from_gguf(config, get, renormalize=True))


def qwen_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
    return ExpertsConfig(
        # Newer files have num_local_experts.
        num_experts=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
