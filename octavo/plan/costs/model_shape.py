"""The numbers of a model that determine the cost of a step, read from its config.json or GGUF file."""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.lab.errors import PlanError
from runtime.model_files import PACKAGE_PREFIX, resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model. Counts are parameters (not bytes) of one layer, unless stated otherwise."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    # Heads whose KV is kept; 0 for MLA, because every rank keeps its whole latent.
    num_kv_heads: int
    vocab_size: int
    max_model_len: int
    # False if the head shares the embedding's matrix.
    has_own_head: bool = True
    attention_params: int
    # MLP parameters of a layer without experts, or of the shared experts that every token passes.
    mlp_params: int
    # Parameters of one expert; the number of layers with experts; experts in such a layer, and how many a token passes.
    expert_params: int = 0
    num_expert_layers: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    # MLP parameters of the layers without experts, in a model that has layers with experts.
    dense_mlp_params: int = 0
    # Values of KV that a token stores in a layer.
    kv_size: int
    # Multiply-adds per (query, key) pair: scores and values, over all heads.
    pair_macs: int
    # Layers that attend to at most `window` tokens.
    num_window_layers: int = 0
    window: int = 0
    # Bytes per parameter: of the layers (less than the dtype's in quantized models), and of embedding and head.
    layer_param_bytes: float = 2.0
    embedding_param_bytes: float = 2.0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_expert_layers

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def stored_layer_params(self) -> int:
        """Parameters of all layers together, with all experts."""
        return self._layer_params(self.num_experts)

    @property
    def active_layer_params(self) -> int:
        """Parameters that one token is multiplied with, in all layers together."""
        return self._layer_params(self.num_active_experts)

    @property
    def num_params(self) -> int:
        return self.stored_layer_params + self.embedding_params * (2 if self.has_own_head else 1)

    @property
    def weight_bytes(self) -> float:
        embeddings = self.num_params - self.stored_layer_params
        return self.stored_layer_params * self.layer_param_bytes + embeddings * self.embedding_param_bytes

    def divides_among(self, num_ranks: int) -> bool:
        """True if all ranks get equally many heads, and KV heads can be divided or repeated evenly."""
        kv_heads = self.num_kv_heads or 1
        return not self.num_heads % num_ranks and (not kv_heads % num_ranks or not num_ranks % kv_heads)

    def touched_layer_params(self, num_tokens: int) -> float:
        """Parameters that a step of `num_tokens` reads, in all layers together: few tokens miss most experts.

        Assumes that experts are chosen evenly and independently.
        """
        if not self.num_experts or not num_tokens:
            return self._layer_params(self.num_experts)
        missed = (1 - self.num_active_experts / self.num_experts) ** num_tokens
        return self._layer_params(self.num_experts * (1 - missed))

    def _layer_params(self, num_experts: float) -> int:
        dense_mlp = self.dense_mlp_params or self.mlp_params
        return int(
            self.num_layers * self.attention_params
            + self.num_dense_layers * dense_mlp
            + self.num_expert_layers * (self.mlp_params + num_experts * self.expert_params)
        )


# Models whose MLP has two matrices; all others have three (one is a gate).
_PLAIN_MLP = {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "falcon", "phi", "bloom", "mpt", "starcoder2", "nemotron"}
# Models with layers that carry a state from token to token.
_WITH_STATES = ("mamba2", "qwen3_next")
_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}


def read_shape(model: str) -> ModelShape:
    """Reads a model's shape. model: a config.json, a directory that has one, a .gguf file, package:NAME, or a name on
    the hub (only its config.json is fetched). Raises PlanError and ModelNotFoundError."""
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return shape_from_config(_read_json(path), path.stem if path.stem != "config" else path.resolve().parent.name)
    if path.is_dir() or path.suffix == ".gguf" or model.startswith(PACKAGE_PREFIX) or path.exists():
        files = resolve_model(model)
        return _from_gguf(files.path, files.name) if files.is_gguf else _from_directory(files.path, files.name)
    return _from_hub(model)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--model: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--model: {path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise PlanError(f"--model: {path} holds no JSON object")
    return raw


def _from_directory(path: Path, name: str) -> ModelShape:
    return shape_from_config(_read_json(path / "config.json"), name)


def _from_hub(model: str) -> ModelShape:
    from runtime.hub.errors import HubError  # slow to import
    from runtime.hub.pull import pull_config

    try:
        path = pull_config(model)
    except HubError as error:
        raise PlanError(f"--model={model!r} is not a config.json, directory or .gguf file here, and {error}") from None
    return shape_from_config(_read_json(path), model.rsplit("/", 1)[-1])


def shape_from_config(raw: Mapping[str, Any], name: str) -> ModelShape:
    """Makes a shape from the contents of a config.json; of a multimodal model, only the text part. Raises PlanError."""
    # Settings of the whole model, such as the quantization, may be missing in the parts of a multimodal one.
    try:
        config = {**raw, **(raw.get("text_config") or raw.get("llm_config") or {})}
        return _shape(config, name)
    except KeyError as error:
        raise PlanError(f"--model: the config.json of {name} lacks {error.args[0]}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise PlanError(f"--model: the config.json of {name} cannot be used: {error}") from None


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    if config.get("model_type") in _WITH_STATES:
        raise ValueError(
            f"model_type={config['model_type']} has layers that carry a state from token to token: plans are for GPUs, "
            "and such models run on CPUs only so far"
        )
    hidden = int(_first(config, "hidden_size", "n_embd", "d_model"))
    num_layers = int(_first(config, "num_hidden_layers", "n_layer", "num_layers"))
    num_heads = int(_first(config, "num_attention_heads", "n_head"))
    num_kv_heads = int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else num_heads))
    head = int(config.get("head_dim") or hidden // num_heads)
    num_matrices = 2 if config.get("model_type") in _PLAIN_MLP else 3
    intermediate = int(_first(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", or_else=4 * hidden))
    num_experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", or_else=0))
    expert_size = int(_first(config, "moe_intermediate_size", or_else=intermediate))
    shared_size = int(config.get("shared_expert_intermediate_size") or 0)
    shared_size += int(config.get("n_shared_experts") or 0) * expert_size
    dense_layers = int(config.get("first_k_dense_replace") or 0)
    if config.get("kv_lora_rank"):
        attention, kv_size, pair_macs, num_kv_heads = _latent_attention(config, hidden, num_heads)
    else:
        attention = hidden * head * (2 * num_heads + 2 * num_kv_heads)
        kv_size, pair_macs = 2 * num_kv_heads * head, 2 * num_heads * head
    dtype_bytes = _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2.0)
    num_window_layers, window = _windows(config, num_layers)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=int(config["vocab_size"]),
        max_model_len=int(_first(config, "max_position_embeddings", "n_positions", "max_seq_len", or_else=8192)),
        has_own_head=not config.get("tie_word_embeddings", config.get("model_type") in ("gpt2", "gemma", "gemma2")),
        attention_params=attention,
        mlp_params=num_matrices * hidden * (shared_size if num_experts else intermediate),
        dense_mlp_params=num_matrices * hidden * intermediate if num_experts else 0,
        expert_params=num_matrices * hidden * expert_size if num_experts else 0,
        num_expert_layers=num_layers - dense_layers if num_experts else 0,
        num_experts=num_experts,
        num_active_experts=int(_first(config, "num_experts_per_tok", "num_experts_per_token", or_else=2)),
        kv_size=kv_size,
        pair_macs=pair_macs,
        num_window_layers=num_window_layers,
        window=window,
        layer_param_bytes=_quantized_bytes(config.get("quantization_config"), dtype_bytes),
        embedding_param_bytes=dtype_bytes,
    )


_NO_DEFAULT = object()


def _first(config: Mapping[str, Any], *names: str, or_else: Any = _NO_DEFAULT) -> Any:
    """The value of the first of `names` that is set."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if or_else is _NO_DEFAULT:
        raise KeyError(" or ".join(names))
    return or_else


def _latent_attention(config: Mapping[str, Any], hidden: int, num_heads: int) -> tuple[int, int, int, int]:
    """DeepSeek's MLA: parameters, KV size, multiply-adds per pair (on the latent, as in decode), KV heads."""
    latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    query_rank = int(config.get("q_lora_rank") or 0)
    query = num_heads * (nope + rope)
    query_params = query_rank * (hidden + query) if query_rank else hidden * query
    kv_params = hidden * (latent + rope) + latent * num_heads * (nope + value)
    return query_params + kv_params + num_heads * value * hidden, latent + rope, num_heads * (2 * latent + rope), 0


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """The number of layers with a sliding window, and its length."""
    window = int(config.get("sliding_window") or 0)
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    types = config.get("layer_types")
    if types is not None:
        return sum(kind == "sliding_attention" for kind in types), window
    pattern = int(config.get("sliding_window_pattern") or 0)
    return (num_layers - num_layers // pattern if pattern else num_layers), window


def _quantized_bytes(quantization: Mapping[str, Any] | None, dtype_bytes: float) -> float:
    if not quantization:
        return dtype_bytes
    method, bits = str(quantization.get("quant_method", "")), quantization.get("bits") or quantization.get("w_bit")
    if bits:
        group_size = int(quantization.get("group_size") or quantization.get("q_group_size") or 128)
        if quantization.get("desc_act") and group_size > 0:
            # Dequantized when loaded.
            return dtype_bytes
        # Plus a scale and a zero point per group; -1: the group is an output, whose share is negligible.
        return int(bits) / 8 + (4 / group_size if group_size > 0 else 0)
    if method == "compressed-tensors":
        if quantization.get("format") == "mxfp4-pack-quantized":
            return dtype_bytes
        groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
        return max((int(weights.get("num_bits") or 8) / 8 for weights in groups), default=1.0)
    if method == "bitsandbytes":
        # Dequantized when loaded, except LLM.int8.
        return dtype_bytes if quantization.get("load_in_4bit") else 1.0
    if method in ("fp8", "fbgemm_fp8", "modelopt"):
        return 1.0
    if method == "mxfp4":
        # Weights become floats while loading.
        return dtype_bytes
    raise ValueError(f"quantization_config: quant_method={method!r} without bits is not known")


def _from_gguf(path: Path, name: str) -> ModelShape:
    from runtime.tokenizer.gguf_header import HeaderError, read_header  # its imports take half a second

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = read_header(path, data)
    except (OSError, HeaderError) as error:
        raise PlanError(f"--model: {error}") from None
    metadata = header.metadata
    prefix = f"{metadata.get('general.architecture')}."
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    config = {ours: metadata[prefix + theirs] for ours, theirs in names.items() if prefix + theirs in metadata}
    config["vocab_size"] = metadata.get(f"{prefix}vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    return shape_from_config(config, name)
