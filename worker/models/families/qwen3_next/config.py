"""Reads the fields of config.json that are specific to Qwen3-Next."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.attention.recurrent.shape import RecurrentShape
from worker.model_config import RecurrenceConfig
from worker.models.families.mixtral.config import qwen_experts
from worker.models.rope import rope_dims, rope_from_config_json

# Rope rotates a quarter of each head, and every fourth layer has attention, in files that don't say.
_PARTIAL_ROTARY_FACTOR, _INTERVAL = 0.25, 4
_STATE, _ATTENTION = "linear_attention", "full_attention"


def qwen3_next_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    value_size = int(raw.get("linear_value_head_dim", 128))
    shape = RecurrentShape(
        rule="delta",
        num_heads=int(raw.get("linear_num_value_heads", 32)),
        num_groups=int(raw.get("linear_num_key_heads", 16)),
        key_size=int(raw.get("linear_key_head_dim", 128)),
        value_size=value_size,
        num_taps=int(raw.get("linear_conv_kernel_dim", 4)),
        norm_size=value_size,
    )
    return {
        "rope": rope_from_config_json(raw, is_partial=True),
        "rope_dims": rope_dims(raw, default=_PARTIAL_ROTARY_FACTOR),
        "layer_windows": (0,) * num_layers,
        "qk_norm": True,
        "norms_lack_one": True,
        "attention_gate": True,
        "recurrence": RecurrenceConfig(shape=shape, layers=_layers_with_state(raw, num_layers)),
        "experts": replace(
            qwen_experts(raw, num_layers),
            renormalize=bool(raw.get("norm_topk_prob", True)),
            shared_intermediate_size=int(raw["shared_expert_intermediate_size"]),
            has_shared_gate=True,
        ),
        # The layers for multi-token prediction.
        "left_out": ("mtp.",),
    }


def _layers_with_state(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    types = raw.get("layer_types")
    if types is None:
        interval = int(raw.get("full_attention_interval") or _INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    unknown = sorted({str(kind) for kind in types} - {_STATE, _ATTENTION})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types has {len(types)} entries, {', '.join(unknown) or 'all known'}, for {num_layers} layers: each "
            f"is {_STATE} or {_ATTENTION}"
        )
    return tuple(kind == _STATE for kind in types)
