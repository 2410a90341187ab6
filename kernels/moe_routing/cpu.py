"""Routing of tokens to experts on a CPU.

Legend: T tokens, E experts, K experts of a token.
"""

import torch


def route(logits_TE: torch.Tensor, *, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token by softmax, the best first and of equals the lowest: weights_TK float32,
    experts_TK int64. renormalize: weights are divided by their sum."""
    scores_TE = torch.softmax(logits_TE.float(), dim=1)
    weights_TE, experts_TE = scores_TE.sort(dim=1, descending=True, stable=True)
    weights_TK = weights_TE[:, :top_k]
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    return weights_TK, experts_TE[:, :top_k]
