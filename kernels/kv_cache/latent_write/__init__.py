"""Prepares MLA's queries and latents for attention: rope, and the write of latents into the cache.

Legend: T tokens, H heads, L latent size, R rope size.
"""

import torch

from kernels.backend import Backend
from kernels.elementwise.rope import rotate_pairs_
from kernels.kv_cache.latent_write.torch_cpu import mla_cache_write


class RopeLatentWrite:
    """Rope and cache write of one MLA layer."""

    def __init__(self, backend: Backend, *, interleaved: bool, kv_scale: torch.Tensor | None = None) -> None:
        """interleaved: pairs that rope rotates are (2i, 2i + 1), as always on a CPU, instead of (i, i + R / 2).
        kv_scale: float32 [1], for an e4m3 cache on a GPU."""
        assert interleaved or backend.gpu is not None
        self._on_gpu, self._interleaved, self._kv_scale = backend.gpu is not None, interleaved, kv_scale

    def __call__(
        self,
        q_THR: torch.Tensor,
        latent_TL: torch.Tensor,
        k_TR: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> None:
        """Rotates the rope parts of queries and of the key that all heads share, in place, and writes the normed latent
        and that key to the cache.

        q_THR, k_TR: stride 1 in the last dim, any others. cos_sin: from kernels.elementwise.rope.CosSinTable. cache:
        one layer's blocks. slots_T: int64, block * block size + offset, all different; on a GPU -1 is padding, which is
        not written.
        """
        k_T1R = k_TR[:, None]
        if not self._on_gpu:
            rotate_pairs_(q_THR, cos_sin)
            rotate_pairs_(k_T1R, cos_sin)
            mla_cache_write(latent_TL, k_TR, cache, slots_T)
            return
        from kernels.elementwise.rope.triton import rope_
        from kernels.kv_cache.latent_write.triton import mla_cache_write as write_on_gpu  # imports Triton

        rope_(q_THR, k_T1R, cos_sin, interleaved=self._interleaved)
        write_on_gpu(latent_TL, k_TR, cache, slots_T, kv_scale=self._kv_scale)
