"""Head norms, rope and cache write in PyTorch, as separate ops.

Legend: T tokens, N blocks, B tokens of a block, K KV heads, D head size, E = 2 * K * D numbers of a token.
"""

import torch

from kernels.elementwise.rms_norm import rms_norm
from kernels.elementwise.rope import apply_rope_


def cache_write(cache_NB2KD: torch.Tensor, kv_TE: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Writes token t's keys and values, kv_TE[t], to slot slots_T[t] = block * B + offset, rounded to the cache's
    dtype.

    slots_T: int64, all different. The cache is contiguous.
    """
    slots_SE = cache_NB2KD.view(cache_NB2KD.shape[0] * cache_NB2KD.shape[1], -1)
    slots_SE.index_copy_(0, slots_T, kv_TE.to(cache_NB2KD.dtype))


class TorchRopeCacheWrite:
    """RopeCacheWrite on a CPU without C++ kernels."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_size: int, head_norm_HD: torch.Tensor | None, eps: float
    ) -> None:
        self._num_heads, self._num_rotated, self._head_size = num_heads, num_heads + num_kv_heads, head_size
        self._head_norm_HD, self._eps = head_norm_HD, eps

    def __call__(
        self, qkv_TF: torch.Tensor, cos_sin_T1P: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        rotated_THD = qkv_TF.view(len(qkv_TF), -1, self._head_size)[:, : self._num_rotated]
        if self._head_norm_HD is not None:
            rotated_THD.copy_(rms_norm(rotated_THD, self._head_norm_HD, self._eps))
        apply_rope_(rotated_THD, cos_sin_T1P)
        # k and v are the last columns, in the order of a cache slot.
        cache_write(cache, qkv_TF[:, self._num_heads * self._head_size :], slots_T)
        return rotated_THD[:, : self._num_heads]
