"""Paged attention on a CPU."""

import torch

from kernels.paged_attention.plan import AttentionPlan


def paged_attention(
    q_THD: torch.Tensor, cache_NB2KD: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

    q_THD: float32 or bfloat16. cache_NB2KD: one layer's blocks [N, B, 2, KV heads, D], keys and values of this step's
    tokens included, with finite numbers in block 0. plan: of this step, for the cache's dtype and head shape.
    """
    groups = plan.decode_groups
    if len(groups) == 1 and not plan.prefill_rows:
        return groups[0].attend(q_THD.float(), cache_NB2KD, scale).to(q_THD.dtype)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for group in groups:
        o_RHD = group.attend(q_THD[group.token_indices_R].float(), cache_NB2KD, scale)
        out_THD[group.token_indices_R] = o_RHD.to(q_THD.dtype)
    for row in plan.prefill_rows:
        row.attend(q_THD, cache_NB2KD, scale, out_THD)
    return out_THD
