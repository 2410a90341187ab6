"""Paged attention, a query at a time."""

import numpy as np
import torch


def paged_attention(
    q_THD: torch.Tensor,
    cache_NB2KD: torch.Tensor,
    *,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """In float64; arguments as of `plan_attention`."""
    num_heads, (block_size, _, num_kv_heads, _) = q_THD.shape[1], cache_NB2KD.shape[1:]
    out_THD = torch.empty_like(q_THD, dtype=torch.float64)
    for row, context_len in enumerate(context_lens.tolist()):
        first_query, end = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(first_query, end):
            position = context_len - (end - token)
            visible = range(max(0, position + 1 - window) if window else 0, position + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                entries = [cache_NB2KD[block_tables[row, p // block_size], p % block_size, :, kv_head] for p in visible]
                kv_L2D = torch.stack(entries).double()
                weights_L = torch.softmax(kv_L2D[:, 0] @ q_THD[token, head].double() * scale, dim=0)
                out_THD[token, head] = weights_L @ kv_L2D[:, 1]
    return out_THD
