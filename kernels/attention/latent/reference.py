"""MLA, a query and a head at a time."""

import numpy as np
import torch


def mla_attention(
    q_THE: torch.Tensor,
    cache_NBE: torch.Tensor,
    *,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    scale: float,
    latent_size: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64. Arguments as for kernels.attention.latent.triton.mla_attention. A row without context gets zeros."""
    num_tokens, num_heads, _ = q_THE.shape
    block_size = cache_NBE.shape[1]
    out_THL = torch.zeros(num_tokens, num_heads, latent_size, dtype=torch.float64)
    for row, context_len in enumerate(context_lens.tolist()):
        first_query, end = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(first_query, end if context_len else first_query):
            visible = torch.arange(context_len - (end - token) + 1)
            blocks = torch.from_numpy(block_tables[row].astype(np.int64))[visible // block_size]
            entries_CE = cache_NBE[blocks, visible % block_size].cpu().double()
            if kv_scale is not None:
                entries_CE = entries_CE * kv_scale.cpu().double()
            for head in range(num_heads):
                weights_C = torch.softmax(entries_CE @ q_THE[token, head].cpu().double() * scale, dim=0)
                out_THL[token, head] = weights_C @ entries_CE[:, :latent_size]
    return out_THL
