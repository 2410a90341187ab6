"""MLA's cache write, one token at a time."""

import torch

from kernels.gemm.quantize.reference import to_e4m3


def mla_cache_write(
    latent_TL: torch.Tensor,
    rope_TR: torch.Tensor,
    cache_NBE: torch.Tensor,
    slots_T: torch.Tensor,
    kv_scale: torch.Tensor | None = None,
) -> None:
    for token, slot in enumerate(slots_T.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, cache_NBE.shape[1])
        entry_E = torch.cat((latent_TL[token], rope_TR[token]))
        stored_E = entry_E if kv_scale is None else to_e4m3(entry_E, kv_scale)
        cache_NBE[block, offset] = stored_E.to(cache_NBE.dtype)
