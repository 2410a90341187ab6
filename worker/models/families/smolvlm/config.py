"""Reads the config.json of Idefics3 and SmolVLM: the language model is a Llama."""

from collections.abc import Mapping
from typing import Any

from worker.models.families.llama import llama_fields


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's settings. Raises ValueError if it is no Llama."""
    text = dict(raw.get("text_config") or {})
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ValueError(f"text_config model_type={kind!r} is not supported; llama is")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"text_config hidden_act={text['hidden_act']!r} is not supported; silu is")
    return {
        **text,
        "image_token_id": raw.get("image_token_id", 128257),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_id": text.get("eos_token_id", raw.get("eos_token_id")),
        "max_position_embeddings": text.get("max_position_embeddings", 2048),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5),
    }


def smolvlm_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """raw: from `text_config`."""
    return {
        **llama_fields(raw, num_layers),
        "embedded_token_ids": frozenset((int(raw["image_token_id"]),)),
        "left_out": ("vision_model.", "connector."),
    }
