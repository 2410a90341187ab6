"""The ops of this folder in the plainest way: one row, a full sort, float64 sums."""

import torch


def draw_reference(probs_V: torch.Tensor, uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    """`draw` for one row. probs_V: float32."""
    return int(torch.searchsorted(filtered_cdf_reference(probs_V, top_k, top_p, min_p), uniform, right=True))


def filtered_cdf_reference(probs_V: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The filtered distribution's CDF in order of token id, float64 [V], ending in 1."""
    sorted_V = probs_V.sort(descending=True).values
    if top_k:
        sorted_V = sorted_V[:top_k]
    least = sorted_V[-1]
    if top_p < 1.0:
        cumulative = sorted_V.double().cumsum(0)
        reached = cumulative >= top_p * cumulative[-1]
        least = sorted_V[reached][0]
    least = torch.maximum(least, torch.tensor(min_p, dtype=torch.float32) * sorted_V[0])
    kept_V = torch.where(probs_V >= least, probs_V, 0).double()
    return kept_V.cumsum(0) / kept_V.sum()


def penalties_reference(
    logits_V: torch.Tensor,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> torch.Tensor:
    """`apply_penalties`, one token after the other, into a new tensor."""
    result_V = logits_V.clone()
    for token in set(prompt) | set(output):
        logit = result_V[token]
        result_V[token] = logit / repetition if logit > 0 else logit * repetition
    for token in set(output):
        result_V[token] -= frequency * output.count(token) + presence
    return result_V
