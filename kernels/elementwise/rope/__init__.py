"""Rotary position embeddings (arXiv 2104.09864): the cosines and sines of a step's positions, by C++, PyTorch or
Triton.
"""

import ctypes
from ctypes import c_float, c_int32, c_void_p

import torch

from kernels.backend import Backend
from kernels.elementwise.rope.torch_cpu import apply_rope_, cos_sin_table, interleave_rope_pairs, rotate_pairs_


class CosSinTableStruct(ctypes.Structure):
    """`CosSinTable` of kernels/elementwise/rope/cos_sin_table.h."""

    _fields_ = (("frequencies", c_void_p), ("magnitude", c_float), ("rotated", c_int32), ("pairs", c_int32))


class CosSinTable:
    """One model's cosines and sines, in the form that kernels.kv_cache.write expects on the same backend.

    Legend: T tokens, P pairs that rope rotates, at most half the head size.
    """

    def __init__(
        self, backend: Backend, frequencies_P: torch.Tensor, magnitude: float, num_pairs: int | None = None
    ) -> None:
        """frequencies: radians a token. magnitude: multiplies cosines and sines. num_pairs: of a head; None: P. The
        pairs after the first P stay as they are: on a CPU their cosine is 1, on a GPU the table leaves them out."""
        self._kernels, self._gpu = backend.native, backend.gpu
        self._num_pairs = len(frequencies_P) if backend.gpu is not None else num_pairs or len(frequencies_P)
        assert self._num_pairs >= len(frequencies_P)
        self._frequencies_P, self._magnitude = frequencies_P.float().contiguous().to(backend.device), magnitude
        self._struct = CosSinTableStruct(
            frequencies=self._frequencies_P.data_ptr(),
            magnitude=magnitude,
            rotated=len(frequencies_P),
            pairs=self._num_pairs,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a token's row: [1, num_pairs] complex numbers; on a GPU [2 P], cosines then sines."""
        return (1, self._num_pairs) if self._gpu is None else (2 * self._num_pairs,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.complex64 if self._gpu is None else torch.float32

    def __call__(self, positions_T: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fills and returns `out`, contiguous [T, *shape] in `dtype`. positions_T: int64; on a GPU also int32."""
        assert out.shape == (len(positions_T), *self.shape)
        assert out.dtype is self.dtype
        assert out.is_contiguous()
        if self._gpu is not None:
            from kernels.elementwise.rope.triton import cos_sin_rows  # imports Triton

            return cos_sin_rows(positions_T, self._frequencies_P, self._magnitude, out=out)
        if self._kernels is None:
            num_rotated = len(self._frequencies_P)
            out[..., num_rotated:] = 1
            out[..., :num_rotated] = cos_sin_table(positions_T, self._frequencies_P, self._magnitude)
            return out
        assert positions_T.dtype is torch.int64
        self._kernels.cos_sin_table(
            ctypes.addressof(self._struct), positions_T.data_ptr(), len(positions_T), out.data_ptr()
        )
        return out


__all__ = ["CosSinTable", "apply_rope_", "cos_sin_table", "interleave_rope_pairs", "rotate_pairs_"]
