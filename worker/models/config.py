"""Reads a ModelConfig from config.json or from GGUF metadata."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.model_config import ExpertsConfig, ModelConfig, RopeConfig, SamplingDefaults
from worker.models.deepseek.config import DEEPSEEK, deepseek_experts, deepseek_from_config_json
from worker.models.gemma3.config import GEMMA3, gemma3_from_config_json, gemma3_from_gguf, gemma3_turn_ends
from worker.models.llama4.config import LLAMA4, llama4_experts, llama4_from_config_json, llama4_text_config
from worker.models.rope import rope_from_config_json, yarn

ARCHITECTURES = (
    *DEEPSEEK,
    GEMMA3,
    *LLAMA4,
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


# More than any model has: a damaged file must not make the worker lay out billions of layers.
MAX_LAYERS = 4096


# GGUF names an architecture as llama.cpp does; here it bears its name in config.json.
GGUF_ARCHITECTURES = {
    "gemma3": GEMMA3,
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_from_directory(path: Path) -> ModelConfig:
    """From config.json and, if there is one, generation_config.json.

    Raises ValueError, naming the file, for JSON that does not parse, a model that is not supported, or a number
    that is missing.
    """
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    try:
        return _from_config_json(raw, read_json(generation) if generation.is_file() else {})
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Iterable[str], freq_factors: tuple[float, ...] | None = None
) -> ModelConfig:
    """From GGUF metadata (key -> number, string or list). freq_factors: the tensor rope_freqs.weight, if any.

    Raises ValueError for a model that is not supported or a number that is missing.
    """
    try:
        return _from_gguf(metadata, frozenset(tensor_names), freq_factors)
    except KeyError as error:
        raise ValueError(f"GGUF metadata lacks {error.args[0]}") from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"GGUF metadata is damaged: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ValueError, naming the file, if there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    return raw


def _layer_count(count: Any) -> int:
    if not 1 <= int(count) <= MAX_LAYERS:
        raise ValueError(f"{count} layers; 1 to {MAX_LAYERS} are supported")
    return int(count)


def _known(architecture: str) -> str:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; {', '.join(ARCHITECTURES)} are")
    return architecture


def _from_config_json(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _known((raw.get("architectures") or ["(none named)"])[0])
    if architecture != GEMMA3 and raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; silu is")
    if architecture in LLAMA4:
        raw = llama4_text_config(raw)
    num_layers, num_heads = _layer_count(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    eos = {*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    family: dict[str, Any]
    if architecture == GEMMA3:
        family = gemma3_from_config_json(raw, num_layers)
    elif architecture in DEEPSEEK:
        family = deepseek_from_config_json(raw, num_layers)
    elif architecture in LLAMA4:
        family = llama4_from_config_json(raw, num_layers)
    else:
        family = {
            "rope": rope_from_config_json(raw),
            "qk_norm": architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "layer_windows": _layer_windows(architecture, raw, num_layers),
        }
    sizes: dict[str, Any] = {
        "intermediate_size": int(raw["intermediate_size"]),
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_size": int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
    }
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        experts=experts_from_config_json(architecture, raw, num_layers),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=frozenset(eos),
        default_sampling=SamplingDefaults(
            **{name: generation.get(name) for name in SamplingDefaults.__dataclass_fields__}
        ),
        **(sizes | family),
    )


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _layer_windows(architecture: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0)
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or not raw.get("use_sliding_window", False):
        return (0,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", num_layers))
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != num_layers:
        raise ValueError(f"layer_types: {num_layers} of full_attention or sliding_attention are expected, not {types}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _from_gguf(
    metadata: Mapping[str, Any], tensor_names: frozenset[str], freq_factors: tuple[float, ...] | None
) -> ModelConfig:
    prefix = metadata["general.architecture"]
    if prefix not in GGUF_ARCHITECTURES:
        raise ValueError(f"general.architecture={prefix!r} is not supported; {', '.join(GGUF_ARCHITECTURES)} are")

    def get(name: str, *default: Any) -> Any:
        key = f"{prefix}.{name}"
        return metadata.get(key, *default) if default else metadata[key]

    architecture = _known(GGUF_ARCHITECTURES[prefix])
    num_layers = _layer_count(get("block_count"))
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_size = get("attention.key_length", None) or hidden_size // num_heads
    if get("rope.dimension_count", head_size) != head_size:
        raise ValueError(f"{prefix}.rope.dimension_count differs from the head size {head_size}; this is not supported")
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    vocab_size = get("vocab_size", None) or len(metadata["tokenizer.ggml.tokens"])
    eos = {token for token in ends if token is not None}
    rope, window = _gguf_rope(get, freq_factors), get("attention.sliding_window", 0)
    family: dict[str, Any] = {"layer_windows": (window,) * num_layers}
    if architecture == GEMMA3:
        family = gemma3_from_gguf(get, hidden_size, num_heads, num_layers)
        eos |= gemma3_turn_ends(vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_size=head_size,
        rope=rope,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=get("context_length"),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tie_word_embeddings="output.weight" not in tensor_names,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset(eos),
        **family,
    )


def _gguf_rope(get: Any, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = float(get("rope.freq_base", 10000.0))
    scaling = get("rope.scaling.type", "none")
    if scaling == "none":
        return RopeConfig(theta=theta, freq_factors=freq_factors)
    if scaling == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=get("rope.scaling.factor"), freq_factors=freq_factors)
    if scaling == "yarn":
        original = get("rope.scaling.original_context_length")
        return yarn(theta=theta, factor=get("rope.scaling.factor"), original_max_position_embeddings=original)
    raise ValueError(f"rope.scaling.type={scaling!r} is not supported; none, linear and yarn are")


def experts_from_config_json(architecture: str, raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    """None: the architecture has no mixtures. Raises KeyError for a number that is missing, ValueError for one that
    cannot be."""
    if architecture == "MixtralForCausalLM":
        return ExpertsConfig(
            num_experts=int(raw["num_local_experts"]),
            num_experts_per_token=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["intermediate_size"]),
            renormalize=True,
            layers=(True,) * num_layers,
        )
    if architecture in DEEPSEEK:
        return ExpertsConfig(**deepseek_experts(architecture, raw, num_layers))
    if architecture in LLAMA4:
        return ExpertsConfig(**llama4_experts(raw, num_layers))
    if architecture == "Qwen3MoeForCausalLM":
        step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
        return ExpertsConfig(
            # Newer files say num_local_experts.
            num_experts=int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]),
            num_experts_per_token=int(raw["num_experts_per_tok"]),
            intermediate_size=int(raw["moe_intermediate_size"]),
            renormalize=bool(raw.get("norm_topk_prob", False)),
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        )
    return None
