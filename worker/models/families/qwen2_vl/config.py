"""Reads the config.json of Qwen2-VL and Qwen2.5-VL: the language model is a Qwen2 whose positions have three axes."""

from collections.abc import Mapping
from typing import Any

from worker.models.families.llama import qwen2_fields
from worker.models.rope import rope_settings

_SECTION = (16, 24, 24)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's settings: under text_config since transformers 4.52, at the top before."""
    text = dict(raw.get("text_config") or raw)
    settings = rope_settings(text)
    # The older type means: default, with a section for each axis.
    if settings.get("rope_type", settings.get("type")) == "mrope":
        settings |= {"rope_type": "default"}
    settings.setdefault("rope_theta", text.get("rope_theta", 1_000_000.0))
    tied = raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
    tokens = {name: raw.get(name, 151655 + place) for place, name in enumerate(("image_token_id", "video_token_id"))}
    return {
        **text,
        **tokens,
        "rope_parameters": settings,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
        "eos_token_id": text.get("eos_token_id", raw.get("eos_token_id")),
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
    }


def qwen2_vl_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """raw: from `text_config`. Raises ValueError."""
    section = tuple(int(pairs) for pairs in raw["rope_parameters"].get("mrope_section", _SECTION))
    pairs = int(raw["hidden_size"]) // int(raw["num_attention_heads"]) // 2
    if len(section) != 3 or sum(section) != pairs or min(section) < 0:
        raise ValueError(f"mrope_section={list(section)} must be three numbers whose sum is {pairs}, half of a head")
    return {
        **qwen2_fields(raw, num_layers),
        "mrope_section": section,
        "embedded_token_ids": frozenset((int(raw["image_token_id"]), int(raw["video_token_id"]))),
        "left_out": ("visual.",),
    }
