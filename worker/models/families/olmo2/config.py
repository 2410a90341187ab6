"""Reads the fields of config.json that are specific to OLMo 2."""

from collections.abc import Mapping
from typing import Any

from worker.models.rope import rope_from_config_json


def olmo2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {"rope": rope_from_config_json(raw), "layer_windows": (0,) * num_layers, "projection_norm": True}
