"""What happens to q, k and v between projection and attention: head norms, rope, and the way into the KV cache."""

import torch

from kernels.compute_path import ComputePath
from kernels.rope_cache_write.native import NativeRopeCacheWrite
from kernels.rope_cache_write.pytorch import TorchRopeCacheWrite


class RopeCacheWrite:
    """One layer's.

    Legend: T tokens, H heads, K KV heads, D head size, F = (H + 2 K) * D.
    """

    __slots__ = ("_op",)

    def __init__(
        self,
        path: ComputePath,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_norm_HD: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """head_norm_HD: weights of RMS norms (with `eps`), float32 [H + K, D], of each head of q, then of k."""
        if path.native is not None:
            self._op = NativeRopeCacheWrite(path.native, num_heads, num_kv_heads, head_size, head_norm_HD, eps)
        else:
            self._op = TorchRopeCacheWrite(num_heads, num_kv_heads, head_size, head_norm_HD, eps)

    def __call__(
        self, qkv_TF: torch.Tensor, turns_T1P: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """q, [T, H, D], normed and turned, a view of qkv_TF, which is changed in place; k and v go to the cache.

        Pairs that rope turns lie side by side (kernels.rope.interleave_rope_pairs); turns: of kernels.rope.rope_turns.
        cache: one layer's blocks (worker.kv_cache). slots_T: int64, block * block size + offset, all different.
        """
        return self._op(qkv_TF, turns_T1P, cache, slots_T)


__all__ = ["RopeCacheWrite"]
