"""Reads the fields of config.json that are specific to Llama 4: layers with and without rope, chunks, experts."""

from collections.abc import Mapping
from typing import Any

from worker.model_config import ExpertsConfig, TemperatureConfig
from worker.models.rope import rope_from_config_json, rope_layers
from worker.models.windows import sizes_by_type

# Prefixes of tensors that only images pass through.
_VISION = ("vision_model.", "multi_modal_projector.")
# Defaults for fields that a file leaves out.
_CHUNK, _FLOOR_SCALE, _ATTENTION_SCALE = 8192, 8192, 0.1


def llama4_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of config.json that describes the text model, including `architectures`."""
    return raw | raw["text_config"] | {"architectures": raw["architectures"]} if "text_config" in raw else raw


def llama4_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    rope, has_rope = rope_from_config_json(raw), rope_layers(raw, num_layers)
    norms_heads = bool(raw.get("use_qk_norm", True))
    if norms_heads and rope.attention_factor != 1:
        raise ValueError(
            f"rope_type={rope.scaling!r} with use_qk_norm is not supported: it scales heads, but they are normed after "
            "rope; default, linear and llama3 are"
        )
    temperature = None
    if raw.get("attn_temperature_tuning", True):
        temperature = TemperatureConfig(
            scale=float(raw.get("attn_scale", _ATTENTION_SCALE)),
            floor_scale=int(raw.get("floor_scale", _FLOOR_SCALE)),
        )
    return {
        "rope": rope,
        "rope_layers": has_rope,
        "interleaved_rope": True,
        "norms_rotated_heads": norms_heads,
        "query_temperature": temperature,
        "layer_windows": (0,) * num_layers,
        "layer_chunks": _chunks(raw, has_rope),
        # For layers without experts; the file's intermediate_size is that of experts.
        "intermediate_size": int(raw["intermediate_size_mlp"]),
        "experts": _experts(raw, num_layers),
        "left_out": _VISION,
    }


def _experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    layers, step = raw.get("moe_layers"), int(raw.get("interleave_moe_layer_step", 1))
    if layers is None:
        layers = range(step - 1, num_layers, step) if step > 0 else ()
    return ExpertsConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["intermediate_size"]),
        renormalize=False,
        layers=tuple(layer in layers for layer in range(num_layers)),
        scoring="sigmoid",
        scales_inputs=True,
        shared_intermediate_size=int(raw["intermediate_size"]),
    )


def _chunks(raw: Mapping[str, Any], rope_layers: tuple[bool, ...]) -> tuple[int, ...]:
    types, num_layers = raw.get("layer_types"), len(rope_layers)
    if types is None:
        types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope_layers]
    chunk = int(raw.get("attention_chunk_size", _CHUNK) or 0)
    chunks = sizes_by_type(chunk, types, num_layers, kind="chunked_attention")
    if chunk < 1 and "chunked_attention" in types:
        raise ValueError(f"attention_chunk_size={raw['attention_chunk_size']!r} must be at least 1")
    return chunks
