"""Cache write on a CPU.

Legend: T tokens, N blocks, B tokens of a block, K KV heads, D head size, E = 2 * K * D numbers of a token.
"""

import torch


def cache_write(cache_NB2KD: torch.Tensor, kv_TE: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Writes token t's keys and values, kv_TE[t], to slot slots_T[t] = block * B + offset, rounded to the cache's
    dtype.

    slots_T: int64, all different. The cache is contiguous.
    """
    slots_SE = cache_NB2KD.view(cache_NB2KD.shape[0] * cache_NB2KD.shape[1], -1)
    slots_SE.index_copy_(0, slots_T, kv_TE.to(cache_NB2KD.dtype))
