"""Tiny random models of any decoder that transformers has, with odd sizes, and the files that transformers writes."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 131
# Sizes by the names that configs have for them; a config gets those of its own fields.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 48,
    "n_embd": 48,
    "d_model": 48,
    "dim": 48,
    "embedding_size": 48,
    "word_embed_proj_dim": 48,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "n_inner": 80,
    "intermediate_size_mlp": 72,
    "ffn_hidden_size": 80,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "num_attention_heads": 6,
    "n_head": 6,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "seq_length": 256,
    "sliding_window": 11,
    "attention_window": 11,
    "attention_chunk_size": 11,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 40,
    "expert_ffn_hidden_size": 40,
    "shared_expert_intermediate_size": 56,
    "moe_shared_expert_intermediate_size": 56,
    "shared_intermediate_size": 56,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_num_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What some configs need beside or instead.
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 6, "topk_method": "greedy"},
    "deepseek_v3": {"num_key_value_heads": 6, "head_dim": 8},
    "axk1": {"num_key_value_heads": 6, "head_dim": 8},
    "youtu": {"num_key_value_heads": 6, "head_dim": 8},
    "glm4_moe_lite": {"num_key_value_heads": 6, "head_dim": 8},
    "helium": {"head_dim": 8},
    "minicpm3": {"num_key_value_heads": 6, "head_dim": 8},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "gptj": {"rotary_dim": 8, "head_dim": 8},
    "codegen": {"rotary_dim": 8},
    "persimmon": {"num_key_value_heads": 6},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
}


def decoder_classes() -> Iterator[tuple[str, str]]:
    """Yields (model_type, class name) of all causal language models, sorted."""
    yield from sorted(
        (model_type, name)
        for model_type, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for name in ([each] if isinstance(each, str) else each)
    )


def tiny_config(model_type: str, class_name: str, **changes: Any) -> PreTrainedConfig:
    """Raises whatever the library raises for sizes that do not fit a class."""
    cls = getattr(importlib.import_module("transformers"), class_name)
    config_class = cls.config_class
    default = config_class()
    fields = {name: value for name, value in SIZES.items() if _has(default, name)}
    config = config_class(**(fields | _OWN.get(model_type, {}) | changes))
    config.architectures = [class_name]
    return config


def default_config(class_name: str) -> PreTrainedConfig:
    """Returns a config of the sizes that the library gives if none are named."""
    config = getattr(importlib.import_module("transformers"), class_name).config_class()
    config.architectures = [class_name]
    return config


def _has(config: PreTrainedConfig, name: str) -> bool:
    """Returns True if the config has a field of this name that can be set."""
    made = getattr(type(config), name, None)
    try:
        has = hasattr(config, name)
    except Exception:  # noqa: BLE001 - of a field that differs by layers, the library tells no one value
        return False
    return has and not (isinstance(made, property) and made.fset is None)


def tiny_model(model_type: str, class_name: str, **changes: Any) -> PreTrainedModel:
    """Returns a model in float32, whose norms and biases have an effect."""
    torch.manual_seed(0)
    cls = getattr(importlib.import_module("transformers"), class_name)
    config = tiny_config(model_type, class_name, **changes)
    config._attn_implementation = "eager"
    model: PreTrainedModel = cls(config).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + float(weight.ndim == 1 and "norm" in name.lower()))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def write(model: PreTrainedModel, directory: Path) -> Path:
    """Writes a model's files as transformers does. Returns the directory."""
    model.save_pretrained(directory)
    return directory
