"""Gemma 3's text models (arXiv 2503.19786), and Gemma 2 (arXiv 2408.00118), which has soft caps in place of head norms
and one rope for all layers.

In addition to what the config says (gelu, scaled embeddings, windows with a rope of their own on five of six layers),
the results of attention and MLP are normed before they are added to the residual stream.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kernels.backend import Backend
from worker.layers.attention import Attention
from worker.layers.mlp import GatedMLP
from worker.layers.residual import InputNorm, OutputNorm, ResidualStream, norm_shapes
from worker.model_config import ModelConfig, RopeConfig
from worker.models.decoder import Block, Decoder
from worker.models.family import Family, GgufFamily
from worker.models.rope import rope_from_config_json, ropes_by_type
from worker.models.windows import alternating_windows, windows_by_type
from worker.weights.reader import Shape, WeightReader


class Gemma3Block(Block):
    # Before and after attention, before and after the MLP.
    norms: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, config: ModelConfig, layer: int, prefix: str, reader: WeightReader, backend: Backend) -> None:
        eps = config.rms_norm_eps
        before_attention, after_attention, before_mlp, after_mlp = (f"{prefix}.{name}" for name in self.norms)
        self.before_attention = InputNorm(before_attention, eps)
        self.attention = Attention(config, layer, f"{prefix}.self_attn", self.before_attention, reader, backend)
        self.after_attention = OutputNorm(after_attention, eps, reader, backend)
        self.before_mlp = InputNorm(before_mlp, eps)
        self.mlp = GatedMLP(config, f"{prefix}.mlp", self.before_mlp, reader, backend)
        self.after_mlp = OutputNorm(after_mlp, eps, reader, backend)

    def forward(self, x: ResidualStream) -> ResidualStream:
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))

    @classmethod
    def shapes(cls, config: ModelConfig, layer: int, prefix: str) -> dict[str, Shape]:
        return {
            **Attention.shapes(config, f"{prefix}.self_attn"),
            **GatedMLP.shapes(config, f"{prefix}.mlp"),
            **norm_shapes(prefix, config.hidden_size, *cls.norms),
        }


class Gemma3Model(Decoder):
    block = Gemma3Block


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


# Every other layer has a window, the first one, too.
_PERIOD = 2
_ATTENTION_CAP, _LOGITS_CAP = 50.0, 30.0
# As for Gemma 3 (ggml-org/llama.cpp, src/models/gemma2.cpp).
_GEMMA2_LAYERS_OF_27B = 46
# <end_of_turn> in every Gemma 2 vocabulary, and its size. Few GGUF files name the token.
_GEMMA2_END_OF_TURN, _GEMMA2_VOCAB_SIZE = 107, 256000


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
    is_27b = config.num_layers == _GEMMA2_LAYERS_OF_27B
    turn_ends = {_GEMMA2_END_OF_TURN} if config.vocab_size == _GEMMA2_VOCAB_SIZE else set()
    return replace(
        config,
        query_pre_attn_scalar=config.hidden_size / config.num_heads if is_27b else None,
        layer_windows=alternating_windows({"sliding_window": window}, config.num_layers, period=_PERIOD),
        attention_soft_cap=float(get("attn_logit_softcapping", _ATTENTION_CAP)),
        logits_soft_cap=float(get("final_logit_softcapping", _LOGITS_CAP)),
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        eos_token_ids=config.eos_token_ids | turn_ends,
    )


def _cap(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Returns 0 if the file says that there is no cap."""
    cap = float(raw.get(name, default) or 0)
    if cap < 0:
        raise ValueError(f"{name}={raw[name]!r} must be above 0, or null for no cap")
    return cap


# Three of the four norms of a layer; attn_norm is named as in the llama family.
_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

GEMMA2 = Family(
    architectures=("Gemma2ForCausalLM",),
    model=Gemma3Model,
    fields=gemma2_fields,
    hidden_act=None,
    gguf=GgufFamily(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        layer_names=_LAYER_NAMES,
        complete=gemma2_from_gguf,
    ),
)
GEMMA3 = Family(
    architectures=("Gemma3ForCausalLM",),
    model=Gemma3Model,
    fields=gemma3_fields,
    hidden_act=None,
    gguf=GgufFamily(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        layer_names=_LAYER_NAMES,
        complete=gemma3_from_gguf,
    ),
)
