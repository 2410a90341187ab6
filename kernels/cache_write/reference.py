"""Cache write, a token at a time."""

import torch

from kernels.fp8_quantize.reference import to_e4m3


def cache_write(cache_NB2KD: torch.Tensor, kv_TE: torch.Tensor, slots_T: torch.Tensor) -> None:
    for token, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, cache_NB2KD.shape[1])
        cache_NB2KD[block, offset] = kv_TE[token].view(cache_NB2KD.shape[2:])


def gpu_cache_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cache_N2KBD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """To the cache of kernels/paged_attention/gpu_cache.py; scales are those of an e4m3 one."""
    block_size = cache_N2KBD.shape[3]
    for token, slot in enumerate(slots_T.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for part, (x_TKD, scale) in enumerate(((k_TKD, k_scale), (v_TKD, v_scale))):
            stored = x_TKD[token] if scale is None else to_e4m3(x_TKD[token], scale[:, None])
            cache_N2KBD[block, part, :, offset] = stored.to(cache_N2KBD.dtype)
