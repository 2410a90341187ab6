"""Routing, one token at a time, in float64."""

import math

import torch


def route_reference(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.moe.routing.triton.route`, with weights_TK float64 and experts_TK int64."""
    weights, experts = [], []
    for logits in logits_TE.double().tolist():
        if scoring == "softmax":
            total = sum(math.exp(logit - max(logits)) for logit in logits)
            scores = [math.exp(logit - max(logits)) / total for logit in logits]
        else:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        wanted = scores if bias_E is None else [a + b for a, b in zip(scores, bias_E.tolist(), strict=True)]
        size = len(logits) // num_groups
        of_group = [sorted(wanted[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
        group_scores = [sum(best[: 1 if bias_E is None else 2]) for best in of_group]
        groups = sorted(range(num_groups), key=lambda g: (-group_scores[g], g))[:top_k_groups]
        candidates = [expert for expert in range(len(logits)) if expert // size in groups]
        chosen = sorted(candidates, key=lambda expert: (-wanted[expert], expert))[:top_k]
        divisor = sum(scores[expert] for expert in chosen) if renormalize else 1.0
        weights.append([scores[expert] / divisor * scaling_factor for expert in chosen])
        experts.append(chosen)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(experts)
