"""The turns of a step's positions: by C++ (rope_turns.h beside this file), PyTorch, or Triton."""

import ctypes

import torch

from kernels.compute_path import ComputePath
from kernels.native.library import RopeTurnsStruct
from kernels.rope.cpu import rope_turns


class RopeTurns:
    """Of one model, in the form that kernels.rope_cache_write takes on the same path.

    Legend: T tokens, P = half the head size.
    """

    def __init__(self, path: ComputePath, frequencies_P: torch.Tensor, magnitude: float) -> None:
        """frequencies: radians a token. magnitude: of each turn."""
        self._kernels, self._gpu = path.native, path.gpu
        self._frequencies_P, self._magnitude = frequencies_P.float().contiguous().to(path.device), magnitude
        self._struct = RopeTurnsStruct(
            frequencies=self._frequencies_P.data_ptr(), magnitude=magnitude, pairs=len(frequencies_P)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a token's turns: [1, P] complex ones, on a GPU [2 P] cosines and sines."""
        num_pairs = len(self._frequencies_P)
        return (1, num_pairs) if self._gpu is None else (2 * num_pairs,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.complex64 if self._gpu is None else torch.float32

    def __call__(self, positions_T: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out, [T, *shape] of dtype and contiguous, with the turns at positions_T, int64 (on a GPU also int32)."""
        assert out.shape == (len(positions_T), *self.shape)
        assert out.dtype is self.dtype
        assert out.is_contiguous()
        if self._gpu is not None:
            from kernels.rope.gpu import cos_sin_rows  # imports Triton

            return cos_sin_rows(positions_T, self._frequencies_P, self._magnitude, out=out)
        if self._kernels is None:
            return out.copy_(rope_turns(positions_T, self._frequencies_P, self._magnitude))
        assert positions_T.dtype is torch.int64
        self._kernels.rope_turns(
            ctypes.addressof(self._struct), positions_T.data_ptr(), len(positions_T), out.data_ptr()
        )
        return out
