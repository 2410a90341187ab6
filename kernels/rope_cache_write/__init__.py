"""What happens to q, k and v between projection and attention: head norms, rope, and the way into the KV cache."""

import torch

from kernels.compute_path import ComputePath
from kernels.paged_attention.kv_scales import KVScales
from kernels.rope_cache_write.native import NativeRopeCacheWrite
from kernels.rope_cache_write.pytorch import TorchRopeCacheWrite
from kernels.rope_cache_write.triton_path import TritonRopeCacheWrite


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
        kv_scales: KVScales | None = None,
        interleaved: bool = False,
    ) -> None:
        """head_norm_HD: weights of RMS norms (with `eps`), float32 [H + K, D], of each head of q, then of k; on a GPU
        all of q's are the same, and all of k's. kv_scales: of a cache of e4m3. interleaved: pairs that rope turns
        lie side by side on a GPU, too."""
        if path.gpu is not None:
            self._op = TritonRopeCacheWrite(
                num_heads, head_norm_HD, eps, kv_scales, path.device, interleaved=interleaved
            )
        elif path.native is not None:
            self._op = NativeRopeCacheWrite(path.native, num_heads, num_kv_heads, head_size, head_norm_HD, eps)
        else:
            self._op = TorchRopeCacheWrite(num_heads, num_kv_heads, head_size, head_norm_HD, eps)

    def __call__(
        self, qkv_TF: torch.Tensor, turns: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """q, [T, H, D], normed and turned, a view of qkv_TF, which is changed in place; k and v go to the cache.

        Pairs that rope turns lie side by side (kernels.rope.interleave_rope_pairs), on a GPU half a head apart, unless
        they are said to be `interleaved` there, too. turns:
        of kernels.rope.RopeTurns. cache: one layer's blocks (worker.kv_cache). slots_T: int64, block * block size +
        offset, all different; on a GPU -1 is padding, whose k and v go nowhere.
        """
        return self._op(qkv_TF, turns, cache, slots_T)


__all__ = ["RopeCacheWrite"]
