"""Prepares q, k and v for attention: head norms, rope, and the write of k and v into the KV cache."""

import torch

from kernels.backend import Backend
from kernels.kv_cache.layout import KVScales
from kernels.kv_cache.write.native import NativeRopeCacheWrite
from kernels.kv_cache.write.torch_cpu import TorchRopeCacheWrite


class TritonRopeCacheWrite:
    """RopeCacheWrite on a GPU."""

    __slots__ = ("_eps", "_interleaved", "_kv_scales", "_norms", "_num_heads")

    def __init__(
        self,
        num_heads: int,
        head_norm_HD: torch.Tensor | None,
        eps: float,
        kv_scales: KVScales | None,
        device: torch.device,
        *,
        interleaved: bool,
    ) -> None:
        """head_norm_HD: one norm for all heads of q, one for all heads of k. interleaved: pairs that rope rotates are
        adjacent, not half a head apart."""
        self._num_heads, self._eps, self._kv_scales, self._interleaved = num_heads, eps, kv_scales, interleaved
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if head_norm_HD is not None:
            self._norms = head_norm_HD[0].contiguous().to(device), head_norm_HD[-1].contiguous().to(device)

    def __call__(
        self, qkv_TF: torch.Tensor, cos_sin_TR: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        from kernels.kv_cache.write.triton import HeadNorms, rope_cache_write

        scales = self._kv_scales
        return rope_cache_write(
            qkv_TF,
            cos_sin_TR,
            cache,
            slots_T,
            num_heads=self._num_heads,
            head_norms=None if self._norms is None else HeadNorms(*self._norms, self._eps),
            interleaved=self._interleaved,
            k_scale=None if scales is None else scales.k,
            v_scale=None if scales is None else scales.v,
        )


class RopeCacheWrite:
    """Head norms, rope and cache write of one layer.

    Legend: T tokens, H heads, K KV heads, D head size, F = (H + 2 K) * D.
    """

    __slots__ = ("_op",)

    def __init__(
        self,
        backend: Backend,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_norm_HD: torch.Tensor | None = None,
        eps: float = 0.0,
        kv_scales: KVScales | None = None,
        interleaved: bool = False,
    ) -> None:
        """head_norm_HD: weights of RMS norms (with `eps`), float32 [H + K, D], for each head of q, then of k; on a GPU
        all heads of q have the same weights, and all heads of k. kv_scales: for an e4m3 cache. interleaved: pairs that
        rope rotates are adjacent on a GPU, too."""
        if backend.gpu is not None:
            self._op = TritonRopeCacheWrite(
                num_heads, head_norm_HD, eps, kv_scales, backend.device, interleaved=interleaved
            )
        elif backend.native is not None:
            self._op = NativeRopeCacheWrite(
                backend.native, num_heads, num_kv_heads, head_size, head_norm_HD, eps, kv_scales
            )
        else:
            self._op = TorchRopeCacheWrite(num_heads, num_kv_heads, head_size, head_norm_HD, eps)

    def __call__(
        self, qkv_TF: torch.Tensor, cos_sin: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Writes k and v to the cache, and returns q, [T, H, D], normed and rotated: a view of qkv_TF, which is changed
        in place.

        Pairs that rope rotates are adjacent on a CPU (kernels.elementwise.rope.interleave_rope_pairs); on a GPU they
        are half a head apart, unless `interleaved`. cos_sin: from kernels.elementwise.rope.CosSinTable. cache: one
        layer's blocks (worker.layers.kv_cache). slots_T: int64, block * block size + offset, all different; on a GPU
        -1 is padding, whose k and v are not written.
        """
        return self._op(qkv_TF, cos_sin, cache, slots_T)


__all__ = ["RopeCacheWrite"]
