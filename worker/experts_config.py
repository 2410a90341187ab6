"""What a model's mixtures of experts are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Of all mixtures of a model. A token's experts are the num_experts_per_token with the largest softmax."""

    num_experts: int
    num_experts_per_token: int
    # Of one expert's MLP.
    intermediate_size: int
    # Weights of a token's experts add up to 1.
    renormalize: bool
    # Of each layer, whether it has a mixture in place of an MLP.
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_token} of {self.num_experts} experts")
        if self.intermediate_size < 1:
            raise ValueError(f"experts of intermediate size {self.intermediate_size}; at least 1 is needed")


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
