"""Reads the fields of config.json and GGUF metadata that are specific to Gemma 2 (arXiv 2408.00118), which computes as
Gemma 3 does, with soft caps in place of head norms and one rope for all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig
from worker.models.rope import rope_from_config_json
from worker.models.windows import alternating_windows

# Every other layer has a window, the first one, too.
_PERIOD = 2
_ATTENTION_CAP, _LOGITS_CAP = 50.0, 30.0
# llama.cpp recognizes the 27B by its number of layers: its scores are divided by the root of hidden_size / num_heads,
# not of the head size (ggml-org/llama.cpp, src/models/gemma2.cpp). GGUF files don't say so.
_LAYERS_OF_27B = 46
# <end_of_turn> in every Gemma 2 vocabulary, and its size. Few GGUF files name the token.
_END_OF_TURN, _VOCAB_SIZE = 107, 256000


def gemma2_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation={activation!r} is not supported; gelu_pytorch_tanh is")
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention=True is not supported; causal attention is")
    return {
        "rope": rope_from_config_json(raw),
        "query_pre_attn_scalar": float(raw.get("query_pre_attn_scalar", 256)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "layer_windows": alternating_windows(raw, num_layers, period=_PERIOD),
        "attention_soft_cap": _cap(raw, "attn_logit_softcapping", _ATTENTION_CAP),
        "logits_soft_cap": _cap(raw, "final_logit_softcapping", _LOGITS_CAP),
        "norms_lack_one": True,
        "activation": "gelu_tanh",
        "embedding_scale": int(raw["hidden_size"]) ** 0.5,
    }


def gemma2_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    window = get("attention.sliding_window", 4096)
    return replace(
        config,
        query_pre_attn_scalar=config.hidden_size / config.num_heads if config.num_layers == _LAYERS_OF_27B else None,
        layer_windows=alternating_windows({"sliding_window": window}, config.num_layers, period=_PERIOD),
        attention_soft_cap=float(get("attn_logit_softcapping", _ATTENTION_CAP)),
        logits_soft_cap=float(get("final_logit_softcapping", _LOGITS_CAP)),
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        eos_token_ids=config.eos_token_ids | ({_END_OF_TURN} if config.vocab_size == _VOCAB_SIZE else set()),
    )


def _cap(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Returns 0 if the file says that there is no cap."""
    cap = float(raw.get(name, default) or 0)
    if cap < 0:
        raise ValueError(f"{name}={raw[name]!r} must be above 0, or null for no cap")
    return cap
