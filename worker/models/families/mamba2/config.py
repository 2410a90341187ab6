"""Reads the config.json of Mamba-2."""

from collections.abc import Mapping
from typing import Any

from kernels.attention.recurrent.shape import RecurrentShape
from worker.model_config import NO_ROPE, RecurrenceConfig

# A model without attention has no longest context; this bounds the tables of a sequence.
_LONGEST_CONTEXT = 2**20


def with_common_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds what all other models have: no layer has attention or an MLP."""
    return {
        **raw,
        "num_attention_heads": int(raw["num_heads"]),
        "intermediate_size": int(raw["hidden_size"] * raw.get("expand", 2)),
        "rms_norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "max_position_embeddings": int(raw.get("max_position_embeddings") or _LONGEST_CONTEXT),
    }


def mamba2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    num_heads, head_dim, width = int(raw["num_heads"]), int(raw["head_dim"]), int(raw["intermediate_size"])
    if num_heads * head_dim != width:
        raise ValueError(
            f"num_heads={num_heads} of head_dim={head_dim} do not make hidden_size * expand = {width} numbers"
        )
    num_groups, (least, most) = int(raw.get("n_groups", 8)), raw.get("time_step_limit", (0.0, float("inf")))
    shape = RecurrentShape(
        rule="mamba2",
        num_heads=num_heads,
        num_groups=num_groups,
        key_size=int(raw["state_size"]),
        value_size=head_dim,
        num_taps=int(raw.get("conv_kernel", 4)),
        norm_size=width // max(1, num_groups),
    )
    return {
        "rope": NO_ROPE,
        "layer_windows": (0,) * num_layers,
        # Attention's sizes, which no layer reads.
        "num_kv_heads": num_heads,
        "head_size": 8,
        "recurrence": RecurrenceConfig(
            shape=shape,
            layers=(True,) * num_layers,
            steps=(_number(least), _number(most)),
            bias=bool(raw.get("use_bias", False)),
            conv_bias=bool(raw.get("use_conv_bias", True)),
        ),
    }


def _number(value: Any) -> float:
    """A number; transformers writes infinity, which JSON lacks, as an object."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)
