"""MLA's cache write on a CPU. The layout is the same as on a GPU: kernels/kv_cache/layout.py.

Legend: T tokens, N blocks, B tokens of a block, L latent size, R rope size, E = L + R.
"""

import torch


def mla_cache_write(
    latent_TL: torch.Tensor, rope_TR: torch.Tensor, cache_NBE: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Writes token t's normed latent and its key part, rotated by rope, to slot slots_T[t] = block * B + offset,
    rounded to the cache's dtype.

    slots_T: int64, all different. The cache is contiguous.
    """
    entries_TE = torch.cat((latent_TL, rope_TR), dim=1).to(cache_NBE.dtype)
    cache_NBE.view(-1, cache_NBE.shape[2]).index_copy_(0, slots_T, entries_TE)
