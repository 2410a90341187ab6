"""What a model's mixtures of experts are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.moe_routing.scoring import Scoring
from worker.deepseek_config import DEEPSEEK, deepseek_experts
from worker.llama4_config import LLAMA4, llama4_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Of all mixtures of a model. A token's experts are the num_experts_per_token with the largest scores, as
    kernels.moe_routing says."""

    num_experts: int
    num_experts_per_token: int
    # Of one expert's MLP.
    intermediate_size: int
    # Weights of a token's experts add up to 1.
    renormalize: bool
    # Of each layer, whether it has a mixture in place of an MLP.
    layers: tuple[bool, ...]
    # What a router's logits become.
    scoring: Scoring = "softmax"
    # Each expert has a bias that is added to its score for the choice alone.
    has_bias: bool = False
    # Of successive experts, and of how many of them a token's experts may be.
    num_groups: int = 1
    top_k_groups: int = 1
    # That weights are multiplied by in the end.
    scaling_factor: float = 1.0
    # Weights multiply what an expert gets, not what it gives.
    scales_inputs: bool = False
    # Of an MLP beside the experts, which computes every token; 0: there is none.
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_token} of {self.num_experts} experts")
        if self.intermediate_size < 1:
            raise ValueError(f"experts of intermediate size {self.intermediate_size}; at least 1 is needed")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"n_group={self.num_groups} does not divide {self.num_experts} experts")
        eligible = self.top_k_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.top_k_groups <= self.num_groups or eligible < self.num_experts_per_token:
            raise ValueError(
                f"topk_group={self.top_k_groups} of n_group={self.num_groups} groups, with {eligible} experts for the "
                f"num_experts_per_tok={self.num_experts_per_token} of a token"
            )


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
