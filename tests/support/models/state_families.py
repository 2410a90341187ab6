"""Tiny random models whose layers carry a state from token to token, in sizes that fill no vector."""

from typing import Any

from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

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
