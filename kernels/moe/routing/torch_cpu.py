"""Routing of tokens to experts on a CPU.

Legend: T tokens, E experts, K experts of a token, G groups of experts, S experts of a group.
"""

import torch

from kernels.moe.routing import Scoring


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights_TK float32, experts_TK int64) of each token's top_k experts, best first, ties by lower index.

    Scores are softmax or sigmoid of the logits. Weights are the scores of the chosen experts, divided by their sum if
    renormalize, times scaling_factor. bias_E: float32, added to the scores only for the choice (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). With num_groups, successive experts form groups, and experts are chosen from the
    top_k_groups best groups: ranked by the sum of a group's two best scores with a bias, by its best without
    (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). A token's result does not depend on other tokens.
    """
    logits_TE = logits_TE.float()
    scores_TE = torch.softmax(logits_TE, dim=1) if scoring == "softmax" else sigmoid(logits_TE)
    # Different logits may have equal scores: a sigmoid is 1 from 17 on.
    wanted_TE = logits_TE if bias_E is None else scores_TE + bias_E
    if top_k_groups < num_groups:
        wanted_TE = _within_best_groups(wanted_TE, num_groups, top_k_groups, num_best=1 if bias_E is None else 2)
    experts_TK = wanted_TE.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights_TK = scores_TE.gather(1, experts_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    return weights_TK * scaling_factor, experts_TK


def sigmoid(logits_TE: torch.Tensor) -> torch.Tensor:
    """Computes the sigmoid as a softmax with 0. torch.sigmoid rounds differently where a tensor's last numbers don't
    fill a vector, so a token's scores would depend on the number of tokens."""
    return torch.stack((logits_TE, torch.zeros_like(logits_TE)), dim=-1).softmax(dim=-1)[..., 0]


def _within_best_groups(wanted_TE: torch.Tensor, num_groups: int, top_k: int, *, num_best: int) -> torch.Tensor:
    """Sets experts outside each token's top_k groups to -inf; a group's worth is the sum of its num_best scores."""
    wanted_TGS = wanted_TE.unflatten(1, (num_groups, -1))
    worth_TG = wanted_TGS.sort(dim=2, descending=True).values[:, :, :num_best].sum(dim=2)
    best_TK = worth_TG.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    is_closed_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best_TK, False)
    return wanted_TGS.masked_fill(is_closed_TG[:, :, None], float("-inf")).flatten(1)
