"""A tiny random model of every family, as transformers writes it, in sizes for three purposes: all tests' one table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# odd: few sizes fill a vector, and most options of a config are used. gpu: head sizes that attention's kernels have,
# few layers, because kernels may be interpreted. ranks: what four ranks or stages can divide.
Size = Literal["odd", "gpu", "ranks"]
Fields = dict[str, Any]

VOCAB_SIZE = 131
_ENDS: Fields = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPES: dict[Size, Fields] = {
    "odd": {
        **_ENDS,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "gpu": {
        **_ENDS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 256,
    },
    "ranks": {
        **_ENDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    },
}
# Fields with a value a layer, or with layers' numbers. FAMILIES has them for four layers.
_BY_LAYER, _LAYER_NUMBERS = ("layer_types", "no_rope_layers"), ("mlp_only_layers", "moe_layers")

WINDOW = 11
_WINDOWS: Fields = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
# Experts of Qwen's families: 6, of which a token takes 3; the second layer has an MLP.
_QWEN_EXPERTS: Fields = {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
_LATENT: Fields = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """model_type: transformers' name of the config. fields: fields of the config in all sizes; odd, gpu and ranks: more
    of them in that size, None if it has no such model. without: fields of SHAPES that the config lacks."""

    model_type: str
    fields: Fields = field(default_factory=dict)
    odd: Fields | None = field(default_factory=dict)
    gpu: Fields | None = field(default_factory=dict)
    ranks: Fields | None = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def of(self, size: Size) -> Fields | None:
        return {"odd": self.odd, "gpu": self.gpu, "ranks": self.ranks}[size]


FAMILIES: dict[str, TinyFamily] = {
    "deepseek-v2": TinyFamily(
        model_type="deepseek_v2",
        gpu=None,
        ranks=None,
        odd={
            **_LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 8.0,
            "first_k_dense_replace": 1,
        },
    ),
    # With yarn the score scale is not just the head size's, and cosines are multiplied by a factor other than 1.
    "deepseek-v3": TinyFamily(
        model_type="deepseek_v3",
        without=("head_dim",),
        fields={"n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        odd={**_LATENT, "q_lora_rank": 24, "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7}},
        gpu={
            "num_key_value_heads": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 48,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
        },
        ranks={
            **_LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "num_mtp_layers": 0,
        },
    ),
    # Caps that scores and logits reach, and a score scale that is not the head size's.
    "gemma2": TinyFamily(
        model_type="gemma2",
        fields={
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
        },
        odd={"head_dim": 16, "query_pre_attn_scalar": 8},
        gpu={"query_pre_attn_scalar": 32},
    ),
    # As in larger models, the global rope is scaled and the score scale is not the head size's.
    "gemma3": TinyFamily(
        model_type="gemma3_text",
        fields={
            **_WINDOWS,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _DEFAULT_ROPE,
            },
        },
        odd={"head_dim": 16, "query_pre_attn_scalar": 8},
        gpu={"query_pre_attn_scalar": 32},
    ),
    "glm4": TinyFamily(model_type="glm4", odd={"head_dim": 16}, gpu={"num_hidden_layers": 1}),
    "gpt-oss": TinyFamily(
        model_type="gpt_oss",
        fields={
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 150000.0, "truncate": False},
        },
        odd={"head_dim": 16, "num_local_experts": 5},
        gpu={"num_local_experts": 3},
        ranks={"num_local_experts": 4},
    ),
    # An epsilon large enough to tell apart norms of the stream and of the stream divided by the multiplier.
    "granite": TinyFamily(
        model_type="granite",
        gpu=None,
        fields={
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.31,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "rms_norm_eps": 0.03,
            "attention_bias": True,
        },
    ),
    "llama": TinyFamily(
        model_type="llama",
        fields={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
        odd={"head_dim": 16, "rope_parameters": _LINEAR_ROPE},
    ),
    "llama3": TinyFamily(model_type="llama", odd={"rope_parameters": _LLAMA3_ROPE}, gpu=None, ranks=None),
    # Every other layer has no rope, no chunks, and experts; its queries grow with every fourth token.
    "llama4": TinyFamily(
        model_type="llama4_text",
        fields={
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 0] * 2,
            "attention_chunk_size": WINDOW,
            "floor_scale": 4,
            "attn_scale": 0.3,
            "rope_parameters": _LLAMA3_ROPE,
        },
        odd={"head_dim": 16, "intermediate_size_mlp": 72, "num_local_experts": 5},
        gpu={"intermediate_size_mlp": 80},
        # With one expert a token, as ranks that share experts need it.
        ranks={"intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    ),
    # Biases everywhere, and steps that both limits cut.
    "mamba2": TinyFamily(
        model_type="mamba2",
        gpu=None,
        without=("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        fields={"num_heads": 8, "chunk_size": 8},
        odd={
            "hidden_size": 44,
            "expand": 2,
            "head_dim": 11,
            "state_size": 9,
            "n_groups": 2,
            "use_bias": True,
            "time_step_limit": (0.4, 1.1),
        },
        ranks={"state_size": 12, "n_groups": 4},
    ),
    "mistral": TinyFamily(model_type="mistral", fields={"sliding_window": WINDOW}, odd={"head_dim": 8}),
    "mixtral": TinyFamily(
        model_type="mixtral",
        fields={"num_local_experts": 5, "num_experts_per_tok": 2},
        gpu={"num_hidden_layers": 1},
        ranks={"num_local_experts": 4},
    ),
    # With biases, which the config allows.
    "olmo2": TinyFamily(model_type="olmo2", fields={"attention_bias": True}),
    "olmo3": TinyFamily(
        model_type="olmo3",
        gpu=None,
        fields={
            **_WINDOWS,
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": _DEFAULT_ROPE},
        },
    ),
    "phi3": TinyFamily(model_type="phi3", fields={"sliding_window": WINDOW}),
    # As in Phi-4-mini, rope rotates a part of each head; every prompt is longer than the trained context.
    "phi4": TinyFamily(
        model_type="phi3",
        fields={
            "original_max_position_embeddings": 2,
            "rope_parameters": {**_LONGROPE, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 7.0]},
        },
        gpu={
            "hidden_size": 128,
            "num_hidden_layers": 1,
            "rope_parameters": {
                **_LONGROPE,
                "short_factor": [1.0] * 24,
                "long_factor": [1.0 + i / 8 for i in range(24)],
            },
        },
    ),
    # The first layer attends to everything, the others have windows.
    "qwen2": TinyFamily(
        model_type="qwen2", fields={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen2-yarn": TinyFamily(model_type="qwen2", odd={"rope_parameters": _YARN_ROPE}, gpu=None, ranks=None),
    "qwen2-moe": TinyFamily(
        model_type="qwen2_moe",
        fields=_QWEN_EXPERTS,
        odd={"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56},
        gpu={
            "hidden_size": 128,
            "num_hidden_layers": 1,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        },
        ranks={"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3": TinyFamily(model_type="qwen3", fields={"tie_word_embeddings": True}, odd={"head_dim": 16}),
    "qwen3-moe": TinyFamily(
        model_type="qwen3_moe",
        gpu=None,
        fields={**_QWEN_EXPERTS, "norm_topk_prob": True},
        odd={"head_dim": 16, "moe_intermediate_size": 40},
        ranks={"moe_intermediate_size": 32},
    ),
    # Layers with attention between those with states, and several heads to a key.
    "qwen3-next": TinyFamily(
        model_type="qwen3_next",
        gpu=None,
        fields={
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        odd={
            "hidden_size": 40,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 9,
            "linear_value_head_dim": 13,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
        ranks={
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "smollm3": TinyFamily(
        model_type="smollm3", fields={"no_rope_layers": [1, 0] * 2}, gpu=None, ranks={"tie_word_embeddings": False}
    ),
}


def families_in(size: Size) -> list[str]:
    """Returns the names of the families that have a model of this size."""
    return [name for name, family in FAMILIES.items() if family.of(size) is not None]


def has_experts(name: str) -> bool:
    return any("experts" in each for each in FAMILIES[name].fields)


def tiny_model(name: str, size: Size, *, scale: float = 0.2) -> PreTrainedModel:
    """Makes a model in float32. scale: the standard deviation of all weights, whose mean is 1 in norms and 0 elsewhere.
    Fresh biases are 0 and fresh norms 1, so that code that ignores them would pass."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(FAMILIES[name].model_type, **_fields(name, size))
    # PyTorch's own attention has no soft cap, and transformers takes one without a word.
    attention = "eager" if hasattr(config, "attn_logit_softcapping") else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().float()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in parameter_name else 0.0, scale)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, scale)
    return model


def make_model(name: str, directory: Path) -> PreTrainedModel:
    """Makes and writes a model that ranks can divide. Its weights are large enough for output tokens to vary."""
    model = tiny_model(name, "ranks", scale=0.3)
    model.save_pretrained(directory)
    return model


def _fields(name: str, size: Size) -> Fields:
    family = FAMILIES[name]
    more = family.of(size)
    assert more is not None, f"{name} has no model of size {size}"
    shape = {each: value for each, value in SHAPES[size].items() if each not in family.without}
    fields = {**shape, **family.fields, **more}
    num_layers = fields["num_hidden_layers"]
    fields |= {each: fields[each][:num_layers] for each in _BY_LAYER if each in fields}
    return fields | {
        each: [layer for layer in fields[each] if layer < num_layers] for each in _LAYER_NUMBERS if each in fields
    }
