"""Weights of linear layers in e4m3, as checkpoints for FP8 hold them or as made here from floats.

Legend: O outputs, I inputs, Y and X blocks of 128 of each, ceil(O / 128) and ceil(I / 128).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.fp8_quantize.reference import quantize_blocks, quantize_tokens

BLOCK = 128

# By their byte: looking a number up takes a core 2.5 ns, torch's conversion 9.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """weight[o, i] = its scale * values[o, i]."""

    values_OI: torch.Tensor  # float8_e4m3fn
    # float32: [1, 1] for the tensor, [O, 1] for outputs (channels), or [Y, X] for blocks of 128 x 128.
    scales: torch.Tensor

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.values_OI.shape
        assert self.values_OI.dtype is torch.float8_e4m3fn
        assert self.scales.dtype is torch.float32
        assert self.scales.shape in ((1, 1), (num_outputs, 1), (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK)))

    @property
    def has_blocks(self) -> bool:
        """One block alone is a tensor."""
        return self.scales.shape not in ((1, 1), (len(self.values_OI), 1))


def quantize_fp8(weight_OI: torch.Tensor) -> Fp8Weight:
    """A scale for each output: the largest of a row becomes 448. A row with an infinity or NaN has the scale NaN, and
    so its outputs, which is noticed."""
    values_OI, scales_O1 = quantize_tokens(weight_OI)
    return Fp8Weight(values_OI=values_OI, scales=scales_O1)


def quantize_fp8_blocks(weight_OI: torch.Tensor) -> Fp8Weight:
    """A scale for each block. What is not finite makes its block NaN."""
    values_OI, scales_YX = quantize_blocks(weight_OI)
    return Fp8Weight(values_OI=values_OI, scales=scales_YX)


def in_blocks(weight: Fp8Weight) -> Fp8Weight | None:
    """The same, with scales of blocks; None: those of outputs cannot be said so."""
    if weight.has_blocks or len(weight.scales) == 1:
        return Fp8Weight(values_OI=weight.values_OI, scales=_scales_of_blocks(weight).contiguous())
    return None


def e4m3_floats(values: torch.Tensor) -> torch.Tensor:
    """float32 of float8_e4m3fn."""
    if values.device.type != "cpu":
        return values.float()
    return torch.from_numpy(np.take(_E4M3_VALUES, values.view(torch.uint8).numpy()))


def dequantize_fp8(weight: Fp8Weight) -> torch.Tensor:
    """float32 [O, I]."""
    floats_OI = e4m3_floats(weight.values_OI)
    if weight.has_blocks:
        return scaled_(floats_OI, weight.scales, (BLOCK, BLOCK))
    return floats_OI.mul_(weight.scales)


def scaled_(values_OI: torch.Tensor, scales_YX: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiplied in place by the scales of blocks, so many outputs and inputs large; 0: all of them."""
    num_outputs, num_inputs = values_OI.shape
    scales_OX = scales_YX.repeat_interleave(block[0] or num_outputs, dim=0)[:num_outputs]
    for x, columns_OX in enumerate(values_OI.split(block[1] or num_inputs, dim=1)):
        columns_OX *= scales_OX[:, x : x + 1]
    return values_OI


def map_fp8_rows(weight: Fp8Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Fp8Weight | torch.Tensor:
    """With the outputs (dim 0) moved. float32 of blocks, whose outputs cannot leave them; unless `move` gives back what
    it is given, as on GPUs, whose kernels take outputs in any order."""
    if (moved_OI := move(weight.values_OI)) is weight.values_OI:
        return weight
    if weight.has_blocks:
        return move(dequantize_fp8(weight))
    return Fp8Weight(values_OI=moved_OI, scales=weight.scales if len(weight.scales) == 1 else move(weight.scales))


def concatenate_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """The outputs of all, side by side, with nothing rounded again wherever one layout of scales says what those of
    the parts say: a tensor's is repeated for its outputs or blocks. Blocks whose outputs would not lie in blocks of the
    whole, and blocks beside channels, are quantized anew from float32, with a scale for each output.
    """
    values_OI = torch.cat([weight.values_OI for weight in weights])
    if all(weight.scales.shape[1] == 1 for weight in weights):
        return Fp8Weight(values_OI=values_OI, scales=torch.cat([_scales_of_rows(weight) for weight in weights]))
    have_blocks = all(weight.has_blocks or len(weight.scales) == 1 for weight in weights)
    if have_blocks and all(len(weight.values_OI) % BLOCK == 0 for weight in weights[:-1]):
        return Fp8Weight(values_OI=values_OI, scales=torch.cat([_scales_of_blocks(weight) for weight in weights]))
    return quantize_fp8(torch.cat([dequantize_fp8(weight) for weight in weights]))


def _scales_of_rows(weight: Fp8Weight) -> torch.Tensor:
    """[O, 1]. Blocks have one scale a row where there is one of them across."""
    num_outputs = len(weight.values_OI)
    if weight.has_blocks:
        return weight.scales.repeat_interleave(BLOCK, dim=0)[:num_outputs]
    return weight.scales.expand(num_outputs, 1)


def _scales_of_blocks(weight: Fp8Weight) -> torch.Tensor:
    """[Y, X]"""
    num_outputs, num_inputs = weight.values_OI.shape
    return weight.scales.expand(-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))
