"""Head norms, rope and cache write in plain PyTorch, one token at a time."""

import torch

from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.gemm.quantize.reference import to_e4m3


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
    """Writes to a cache in the layout of kernels/kv_cache/layout.py. Scales are for an e4m3 cache."""
    block_size = cache_N2KBD.shape[3]
    for token, slot in enumerate(slots_T.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for part, (x_TKD, scale) in enumerate(((k_TKD, k_scale), (v_TKD, v_scale))):
            stored = x_TKD[token] if scale is None else to_e4m3(x_TKD[token], scale[:, None])
            cache_N2KBD[block, part, :, offset] = stored.to(cache_N2KBD.dtype)


def rope_cache_write(
    qkv_TF: torch.Tensor,
    cos_sin_T1P: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_norm_HD: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q [T, H, D], k and v [T, K, D] in float64."""
    qkv_THD = qkv_TF.double().unflatten(1, (-1, head_size))
    qk_THD, v_TKD = qkv_THD[:, : num_heads + num_kv_heads], qkv_THD[:, num_heads + num_kv_heads :]
    if head_norm_HD is not None:
        qk_THD = rms_norm(qk_THD, head_norm_HD, eps)
    pairs = torch.view_as_complex(qk_THD.unflatten(-1, (-1, 2)).contiguous()) * cos_sin_T1P.to(torch.complex128)
    rotated_THD = torch.view_as_real(pairs).flatten(-2)
    return rotated_THD[:, :num_heads], rotated_THD[:, num_heads:], v_TKD
