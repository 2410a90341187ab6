"""A tiny random model of every family, as transformers writes it, in sizes that divide by four ranks or stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB_SIZE = 131
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WINDOW = 11


def _qwen2() -> PreTrainedModel:
    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=2))


def _gemma2() -> PreTrainedModel:
    caps: dict[str, Any] = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
    return Gemma2ForCausalLM(Gemma2Config(**_SHAPE, **caps, query_pre_attn_scalar=8, sliding_window=_WINDOW))


def _granite() -> PreTrainedModel:
    multipliers: dict[str, Any] = {
        "embedding_multiplier": 4.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    }
    return GraniteForCausalLM(GraniteConfig(**_SHAPE, **multipliers))


def _gpt_oss() -> PreTrainedModel:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 150000.0}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**_SHAPE, **experts, sliding_window=_WINDOW, rope_parameters=rope))


def _phi4() -> PreTrainedModel:
    rope: dict[str, Any] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1], "long_factor": [1.2, 2.5],
    }  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**_SHAPE, original_max_position_embeddings=2, rope_parameters=rope))


def _qwen2_moe() -> PreTrainedModel:
    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**shape, **experts, shared_expert_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[1])
    )


def _gemma3() -> PreTrainedModel:
    types = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_SHAPE, query_pre_attn_scalar=8, sliding_window=_WINDOW, layer_types=types)
    )


def _mamba2() -> PreTrainedModel:
    ends: dict[str, Any] = {name: _SHAPE[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Mamba2ForCausalLM(
        Mamba2Config(
            **ends, vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=4, num_heads=8, head_dim=8, state_size=12,
            n_groups=4, chunk_size=8,
        )
    )  # fmt: skip


def _qwen3_moe() -> PreTrainedModel:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **experts, norm_topk_prob=True, mlp_only_layers=[1]))


def _qwen3_next() -> PreTrainedModel:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **{**_SHAPE, "head_dim": 16}, **experts, shared_expert_intermediate_size=48, linear_key_head_dim=12,
            linear_value_head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8,
            layer_types=["linear_attention", "full_attention"] * 2,
        )
    )  # fmt: skip


def _deepseek() -> PreTrainedModel:
    shape = {name: value for name, value in _SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    attention: dict[str, Any] = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
    }
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **shape, **attention, **experts, num_key_value_heads=4, topk_group=2, n_shared_experts=1,
            first_k_dense_replace=1, num_mtp_layers=0,
        )
    )  # fmt: skip


def _llama4() -> PreTrainedModel:
    attention: dict[str, Any] = {"attention_chunk_size": 16, "no_rope_layer_interval": 4, "floor_scale": 8}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    return Llama4ForCausalLM(Llama4TextConfig(**_SHAPE, **attention, **experts, intermediate_size_mlp=64))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, attention_bias=True, tie_word_embeddings=True)),
    "llama4": _llama4,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=_WINDOW)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_SHAPE)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SHAPE, sliding_window=_WINDOW)),
    "qwen2": _qwen2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True)),
    "qwen3-moe": _qwen3_moe,
    "deepseek-v3": _deepseek,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**_SHAPE)),
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "mamba2": _mamba2,
    "olmo3": lambda: Olmo3ForCausalLM(Olmo3Config(**_SHAPE, sliding_window=_WINDOW)),
    "phi4": _phi4,
    "qwen2-moe": _qwen2_moe,
    "qwen3-next": _qwen3_next,
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_SHAPE, tie_word_embeddings=False)),
}
WITH_EXPERTS = ("llama4", "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next", "deepseek-v3", "gpt-oss")


def make_model(family: str, directory: Path) -> PreTrainedModel:
    """Makes and writes a model. Weights are large enough for output tokens to vary; all norms have an effect."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (weight.ndim == 1 and "norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    return model
