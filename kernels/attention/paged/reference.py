"""Paged attention, one query at a time."""

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
    attention_chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64. Arguments as for kernels.attention.paged.triton.paged_attention, with NumPy arrays as in `StepRows`.

    A row without context gets zeros. Pass a cache of another layout as a view in this layout.
    """
    num_heads, (block_size, _, num_kv_heads, _) = q_THD.shape[1], cache_NB2KD.shape[1:]
    scales_2K = torch.ones(2, num_kv_heads, dtype=torch.float64)
    for kind, kv_scale in enumerate((k_scale, v_scale)):
        if kv_scale is not None:
            scales_2K[kind] = kv_scale.cpu()
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float64)
    for row, context_len in enumerate(context_lens.tolist()):
        first_query, end = int(query_starts[row]), int(query_starts[row + 1])
        for token in range(first_query, end if context_len else first_query):
            position = context_len - (end - token)
            first = max(0, position + 1 - window) if window else 0
            if attention_chunk:
                first = max(first, position - position % attention_chunk)
            visible = torch.arange(first, position + 1)
            blocks = torch.from_numpy(block_tables[row].astype(np.int64))[visible // block_size]
            kv_L2KD = cache_NB2KD[blocks, visible % block_size].cpu().double() * scales_2K[..., None]
            for head in range(num_heads):
                kv_L2D = kv_L2KD[:, :, head // (num_heads // num_kv_heads)]
                scores_L = kv_L2D[:, 0] @ q_THD[token, head].cpu().double() * scale
                if soft_cap:
                    scores_L = soft_cap * torch.tanh(scores_L / soft_cap)
                if sinks is not None:
                    scores_L = torch.cat((scores_L, sinks[head].cpu().double()[None]))
                weights_L = torch.softmax(scores_L, dim=0)[: len(visible)]
                out_THD[token, head] = weights_L @ kv_L2D[:, 1]
    return out_THD
