"""The turns of a step's positions, by C++ (rope_turns.h beside this file) or PyTorch."""

import ctypes

import torch

from kernels.compute_path import ComputePath
from kernels.native.library import RopeTurnsStruct
from kernels.rope.cpu import rope_turns


class RopeTurns:
    """Of one model.

    Legend: T tokens, P = half the head size.
    """

    def __init__(self, path: ComputePath, frequencies_P: torch.Tensor, magnitude: float) -> None:
        """frequencies: radians a token. magnitude: of each turn."""
        self._kernels = path.native
        self._frequencies_P, self._magnitude = frequencies_P.float().contiguous(), magnitude
        self._struct = RopeTurnsStruct(
            frequencies=self._frequencies_P.data_ptr(), magnitude=magnitude, pairs=len(frequencies_P)
        )

    def __call__(self, positions_T: torch.Tensor, out_T1P: torch.Tensor) -> torch.Tensor:
        """out_T1P, complex64 and contiguous, with what kernels.rope.rope_turns says of int64 positions."""
        if self._kernels is None:
            return out_T1P.copy_(rope_turns(positions_T, self._frequencies_P, self._magnitude))
        assert positions_T.dtype is torch.int64
        assert out_T1P.dtype is torch.complex64
        assert out_T1P.shape == (len(positions_T), 1, len(self._frequencies_P))
        assert out_T1P.is_contiguous()
        self._kernels.rope_turns(
            ctypes.addressof(self._struct), positions_T.data_ptr(), len(positions_T), out_T1P.data_ptr()
        )
        return out_T1P
