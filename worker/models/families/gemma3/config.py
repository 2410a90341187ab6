"""Reads the fields of config.json and GGUF metadata that are specific to Gemma 3, as fields of a ModelConfig."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker.model_config import ModelConfig, RopeConfig
from worker.models.rope import ropes_by_type
from worker.models.windows import windows_by_type

# By default, the first five of every six layers have a window.
_PATTERN = 6
_THETA, _LOCAL_THETA = 1e6, 1e4
# llama.cpp recognizes the 27B by its number of layers: its scores are divided by the root of hidden_size / num_heads,
# not of the head size (ggml-org/llama.cpp, src/models/gemma3.cpp). GGUF files don't say so.
_LAYERS_OF_27B = 62
# <end_of_turn> in every Gemma 3 vocabulary, and the size of the smallest one. Few GGUF files name the token.
_END_OF_TURN, _VOCAB_SIZE = 106, 262144


def gemma3_fields(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation={activation!r} is not supported; gelu_pytorch_tanh is")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ValueError(f"{name}={raw[name]!r} is not supported; Gemma 3's text models have none")
    rope, local_rope = ropes_by_type(raw, _THETA, raw.get("rope_local_base_freq", _LOCAL_THETA))
    return {
        "rope": rope,
        "local_rope": local_rope,
        "query_pre_attn_scalar": float(raw.get("query_pre_attn_scalar", 256)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "layer_windows": _windows(raw, num_layers),
        "qk_norm": True,
        "norms_lack_one": True,
        "activation": "gelu_tanh",
        "embedding_scale": int(raw["hidden_size"]) ** 0.5,
    }


def gemma3_from_gguf(config: ModelConfig, get: Any) -> ModelConfig:
    window, pattern = get("attention.sliding_window"), get("attention.sliding_window_pattern", _PATTERN)
    if not isinstance(pattern, int) or pattern < 1:
        raise ValueError(f"gemma3.attention.sliding_window_pattern={pattern!r}: a number of layers is expected")
    turn_ends = {_END_OF_TURN} if config.vocab_size >= _VOCAB_SIZE else set()
    return replace(
        config,
        local_rope=RopeConfig(theta=float(get("rope.freq_base_swa", _LOCAL_THETA))),
        query_pre_attn_scalar=config.hidden_size / config.num_heads if config.num_layers == _LAYERS_OF_27B else None,
        layer_windows=_by_pattern(window, pattern, config.num_layers),
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        eos_token_ids=config.eos_token_ids | turn_ends,
    )


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    window, types = int(raw["sliding_window"]), raw.get("layer_types")
    if types is None:
        pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or _PATTERN
        return _by_pattern(window, int(pattern), num_layers)
    return windows_by_type(window, types, num_layers)


def _by_pattern(window: int, pattern: int, num_layers: int) -> tuple[int, ...]:
    """Returns the windows of all layers: every pattern-th layer has full attention."""
    return tuple(window if (layer + 1) % pattern else 0 for layer in range(num_layers))
