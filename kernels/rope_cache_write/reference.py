"""Head norms and rope, one after the other; what goes to the cache is returned."""

import torch

from kernels.rms_norm.reference import rms_norm


def rope_cache_write(
    qkv_TF: torch.Tensor,
    turns_T1P: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_norm_HD: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, H, D], k and v [T, K, D] in float64."""
    qkv_THD = qkv_TF.double().unflatten(1, (-1, head_size))
    qk_THD, v_TKD = qkv_THD[:, : num_heads + num_kv_heads], qkv_THD[:, num_heads + num_kv_heads :]
    if head_norm_HD is not None:
        qk_THD = rms_norm(qk_THD, head_norm_HD, eps)
    pairs = torch.view_as_complex(qk_THD.unflatten(-1, (-1, 2)).contiguous()) * turns_T1P.to(torch.complex128)
    turned_THD = torch.view_as_real(pairs).flatten(-2)
    return turned_THD[:, :num_heads], turned_THD[:, num_heads:], v_TKD
