"""Head norms, rope and cache write by the Triton kernel: gpu.py beside this file."""

import torch

from kernels.paged_attention.kv_scales import KVScales


class TritonRopeCacheWrite:
    """What RopeCacheWrite is on a GPU. Turns are cosines and sines."""

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
        """head_norm_HD: one norm for all heads of q, one for all of k. interleaved: pairs that rope turns lie side by
        side, not half a head apart."""
        self._num_heads, self._eps, self._kv_scales, self._interleaved = num_heads, eps, kv_scales, interleaved
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if head_norm_HD is not None:
            self._norms = head_norm_HD[0].contiguous().to(device), head_norm_HD[-1].contiguous().to(device)

    def __call__(
        self, qkv_TF: torch.Tensor, cos_sin_TR: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> torch.Tensor:
        from kernels.rope_cache_write.gpu import HeadNorms, rope_cache_write

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
