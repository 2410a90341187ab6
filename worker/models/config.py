"""Reads a ModelConfig from config.json or from GGUF metadata."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from worker.model_config import ModelConfig, RopeConfig, SamplingDefaults
from worker.models.library.classes import RefusedError
from worker.models.library.config import library_config
from worker.models.registry import ARCHITECTURES, family_of, gguf_family_of
from worker.models.rope import positive_number, yarn

# What computes a model: an own family; the modules of transformers; or auto: an own family if there is one.
ModelImpl = Literal["auto", "octavo", "transformers"]
# More than any model has; a damaged file must not make the worker plan billions of layers.
MAX_LAYERS = 4096
# Sampling parameters are numbers of 32 bits.
_MOST_DEFAULT = 2**31


def config_from_directory(path: Path, model_impl: ModelImpl = "auto") -> ModelConfig:
    """Reads config.json and, if there is one, generation_config.json.

    Raises ValueError, naming the file, for invalid JSON, an unsupported model, or a missing number.
    """
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    try:
        return config_from_json(raw, read_json(generation) if generation.is_file() else {}, model_impl)
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Iterable[str], freq_factors: tuple[float, ...] | None = None
) -> ModelConfig:
    """Reads GGUF metadata (key -> number, string or list). freq_factors: the tensor rope_freqs.weight, if any.

    Raises ValueError for an unsupported model or a missing number.
    """
    try:
        return _from_gguf(metadata, frozenset(tensor_names), freq_factors)
    except KeyError as error:
        raise ValueError(f"GGUF metadata lacks {error.args[0]}") from None
    except (TypeError, ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"GGUF metadata is damaged: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ValueError, naming the file, if there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    return raw


def _layer_count(count: Any) -> int:
    if not 1 <= int(count) <= MAX_LAYERS:
        raise ValueError(f"{count} layers; 1 to {MAX_LAYERS} are supported")
    return int(count)


def config_from_json(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] = MappingProxyType({}),
    model_impl: ModelImpl = "auto",
) -> ModelConfig:
    """Reads the objects in config.json and generation_config.json. Raises KeyError for a missing number, ValueError for
    what is not supported."""
    architecture = (raw.get("architectures") or ["(none named)"])[0]
    if model_impl == "transformers" or (model_impl == "auto" and architecture not in ARCHITECTURES):
        return _of_library(raw, generation, architecture, model_impl)
    family = family_of(architecture)
    if family.hidden_act is not None and raw.get("hidden_act", family.hidden_act) != family.hidden_act:
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; {family.hidden_act} is")
    raw = family.text_config(raw)
    num_layers, num_heads = _layer_count(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    eos = {*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    own_fields = family.fields(raw, num_layers)
    shared_fields: dict[str, Any] = {
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "intermediate_size": int(raw["intermediate_size"]),
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_size": int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "attention_output_bias": bool(raw.get("attention_bias", False)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        max_position_embeddings=int(raw["max_position_embeddings"]),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=frozenset(eos),
        default_sampling=_sampling_defaults(generation),
        **(shared_fields | own_fields),
    )


def _of_library(
    raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str, model_impl: ModelImpl
) -> ModelConfig:
    """Raises ValueError."""
    shared: dict[str, Any] = {
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": frozenset((*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id")))),
        "default_sampling": _sampling_defaults(generation),
    }
    try:
        return library_config(raw, json.dumps(raw, sort_keys=True), shared=shared)
    except RefusedError as error:
        # Messages of the library have lines.
        reason = " ".join(str(error).split()).removesuffix(".")
        if model_impl == "transformers":
            raise ValueError(f"model_impl=transformers: {architecture} is refused: {reason}") from None
        raise ValueError(
            f"architecture {architecture!r} is not supported: it has no family of its own here, and through "
            f"transformers it is refused: {reason}; docs/models.md lists what is supported"
        ) from None


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Raises ValueError for what is no number: it would be in every request that leaves the parameter out."""
    found = {name: generation.get(name) for name in SamplingDefaults.__dataclass_fields__}
    for name, value in found.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if value is None or (isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < _MOST_DEFAULT):
            continue
        raise ValueError(f"generation_config.json: {name}={value!r:.40}: a number is expected, or null")
    return SamplingDefaults(**found)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _from_gguf(
    metadata: Mapping[str, Any], tensor_names: frozenset[str], freq_factors: tuple[float, ...] | None
) -> ModelConfig:
    prefix = metadata["general.architecture"]
    family = gguf_family_of(prefix)

    def get(name: str, *default: Any) -> Any:
        key = f"{prefix}.{name}"
        return metadata.get(key, *default) if default else metadata[key]

    num_layers = _layer_count(get("block_count"))
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_size = get("attention.key_length", None) or hidden_size // num_heads
    rope_dims = get("rope.dimension_count", head_size)
    if rope_dims != head_size and not family.has_partial_rope:
        raise ValueError(f"{prefix}.rope.dimension_count differs from the head size {head_size}; this is not supported")
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    vocab_size = get("vocab_size", None) or len(metadata["tokenizer.ggml.tokens"])
    eos = {token for token in ends if token is not None}
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_size=head_size,
        rope=_gguf_rope(get, freq_factors),
        rope_dims=None if rope_dims == head_size else rope_dims,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=get("context_length"),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        tie_word_embeddings="output.weight" not in tensor_names,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset(eos),
        layer_windows=(get("attention.sliding_window", 0),) * num_layers,
    )
    return family.complete(config, get)


def _gguf_rope(get: Any, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    theta = float(get("rope.freq_base", 10000.0))
    scaling = get("rope.scaling.type", "none")
    if scaling == "none":
        return RopeConfig(theta=theta, freq_factors=freq_factors)
    try:
        if scaling == "linear":
            factor = positive_number(get("rope.scaling.factor"), "factor")
            return RopeConfig(theta=theta, scaling="linear", factor=factor, freq_factors=freq_factors)
        if scaling == "yarn":
            original = get("rope.scaling.original_context_length")
            return yarn(theta=theta, factor=get("rope.scaling.factor"), original_max_position_embeddings=original)
    except TypeError as error:
        raise ValueError(f"rope.scaling.type={scaling!r}: {error}") from None
    raise ValueError(f"rope.scaling.type={scaling!r} is not supported; none, linear and yarn are")
