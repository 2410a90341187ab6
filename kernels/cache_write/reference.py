"""Cache write, a token at a time."""

import torch


def cache_write(cache_NB2KD: torch.Tensor, kv_TE: torch.Tensor, slots_T: torch.Tensor) -> None:
    for token, slot in enumerate(slots_T.tolist()):
        block, offset = divmod(slot, cache_NB2KD.shape[1])
        cache_NB2KD[block, offset] = kv_TE[token].view(cache_NB2KD.shape[2:])
