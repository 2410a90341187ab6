"""Tiny random models whose layers carry a state from token to token, in sizes that fill no vector."""

from typing import Any

from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB_SIZE = 131


def mamba2() -> PreTrainedModel:
    """Biases everywhere, and steps that both limits cut."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 44, "num_hidden_layers": 3, "num_heads": 8}
    return Mamba2ForCausalLM(
        Mamba2Config(
            **sizes, expand=2, head_dim=11, state_size=9, n_groups=2, use_bias=True, chunk_size=8,
            time_step_limit=(0.4, 1.1),
        )
    )  # fmt: skip


def qwen3_next() -> PreTrainedModel:
    """A layer with attention between two with states, an MLP in place of a mixture, and several heads to a key."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=VOCAB_SIZE, hidden_size=40, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, linear_conv_kernel_dim=3,
            linear_key_head_dim=9, linear_value_head_dim=13, linear_num_key_heads=2, linear_num_value_heads=6,
            moe_intermediate_size=40, shared_expert_intermediate_size=56, num_experts=6, num_experts_per_tok=3,
            mlp_only_layers=[1], layer_types=["linear_attention", "full_attention"] * 2,
        )
    )  # fmt: skip
