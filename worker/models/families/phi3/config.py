"""Reads the fields of config.json that are specific to Phi-3."""

from collections.abc import Mapping
from typing import Any

from worker.models.rope import rope_from_config_json, rope_settings
from worker.models.windows import window_of_all


def phi3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    settings = rope_settings(raw)
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling != "default":
        # Old files say su or yarn and mean longrope.
        raise ValueError(f"rope_type={scaling!r} is not supported for Phi-3; only default is (4096-token models)")
    return {"rope": rope_from_config_json(raw), "layer_windows": window_of_all(raw, num_layers)}
