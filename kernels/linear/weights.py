"""Weights of linear layers (floats, int8, int4 and e4m3), and their quantization, slicing for ranks, and packing.

Legend: O outputs, I inputs, G groups of an output, Y x X blocks of e4m3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.gemm.quantize.reference import quantize_blocks, quantize_tokens

BLOCK = 128

# Indexed by byte: looking up a number takes a core 2.5 ns, torch's conversion 9.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """An e4m3 weight: weight[o, i] = its scale * values[o, i]."""

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
        """True for scales per block; a single block counts as a scale per tensor."""
        return self.scales.shape not in ((1, 1), (len(self.values_OI), 1))


def quantize_fp8(weight_OI: torch.Tensor) -> Fp8Weight:
    """Quantizes with a scale per output: the largest number of a row becomes 448. A row with an infinity or NaN gets
    the scale NaN, so that its outputs are NaN, which is noticed."""
    values_OI, scales_O1 = quantize_tokens(weight_OI)
    return Fp8Weight(values_OI=values_OI, scales=scales_O1)


def quantize_fp8_blocks(weight_OI: torch.Tensor) -> Fp8Weight:
    """Quantizes with a scale per block. An infinity or NaN makes its whole block NaN."""
    values_OI, scales_YX = quantize_blocks(weight_OI)
    return Fp8Weight(values_OI=values_OI, scales=scales_YX)


def in_blocks(weight: Fp8Weight) -> Fp8Weight | None:
    """Returns the same weight with scales per block, or None for scales per output, which blocks cannot express."""
    if weight.has_blocks or len(weight.scales) == 1:
        return Fp8Weight(values_OI=weight.values_OI, scales=_scales_of_blocks(weight).contiguous())
    return None


def e4m3_floats(values: torch.Tensor) -> torch.Tensor:
    """Converts float8_e4m3fn to float32."""
    if values.device.type != "cpu":
        return values.float()
    return torch.from_numpy(np.take(_E4M3_VALUES, values.view(torch.uint8).numpy()))


def dequantize_fp8(weight: Fp8Weight) -> torch.Tensor:
    """Returns float32 [O, I]."""
    floats_OI = e4m3_floats(weight.values_OI)
    if weight.has_blocks:
        return scaled_(floats_OI, weight.scales, (BLOCK, BLOCK))
    return floats_OI.mul_(weight.scales)


def scaled_(values_OI: torch.Tensor, scales_YX: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiplies in place by scales per block of `block` outputs x inputs; 0: all of them."""
    num_outputs, num_inputs = values_OI.shape
    scales_OX = scales_YX.repeat_interleave(block[0] or num_outputs, dim=0)[:num_outputs]
    for x, columns_OX in enumerate(values_OI.split(block[1] or num_inputs, dim=1)):
        columns_OX *= scales_OX[:, x : x + 1]
    return values_OI


def map_fp8_rows(weight: Fp8Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Fp8Weight | torch.Tensor:
    """Returns the weight with its outputs (dim 0) moved. A weight with scales per block becomes float32, since outputs
    cannot leave their blocks; unless `move` returns its argument, as on GPUs, whose kernels take any order."""
    if (moved_OI := move(weight.values_OI)) is weight.values_OI:
        return weight
    if weight.has_blocks:
        return move(dequantize_fp8(weight))
    return Fp8Weight(values_OI=moved_OI, scales=weight.scales if len(weight.scales) == 1 else move(weight.scales))


def concatenate_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """Concatenates the outputs of all, without rounding again where one layout can express the scales of all parts: a
    tensor's scale is repeated for its outputs or blocks. Blocks that would not align with blocks of the whole, and
    blocks beside scales per output, are quantized anew from float32, with a scale per output.
    """
    values_OI = torch.cat([weight.values_OI for weight in weights])
    if all(weight.scales.shape[1] == 1 for weight in weights):
        return Fp8Weight(values_OI=values_OI, scales=torch.cat([_scales_of_rows(weight) for weight in weights]))
    have_blocks = all(weight.has_blocks or len(weight.scales) == 1 for weight in weights)
    if have_blocks and all(len(weight.values_OI) % BLOCK == 0 for weight in weights[:-1]):
        return Fp8Weight(values_OI=values_OI, scales=torch.cat([_scales_of_blocks(weight) for weight in weights]))
    return quantize_fp8(torch.cat([dequantize_fp8(weight) for weight in weights]))


def _scales_of_rows(weight: Fp8Weight) -> torch.Tensor:
    """Returns [O, 1]. Scales per block give one scale a row if a single block spans the inputs."""
    num_outputs = len(weight.values_OI)
    if weight.has_blocks:
        return weight.scales.repeat_interleave(BLOCK, dim=0)[:num_outputs]
    return weight.scales.expand(num_outputs, 1)


def _scales_of_blocks(weight: Fp8Weight) -> torch.Tensor:
    """Returns [Y, X]."""
    num_outputs, num_inputs = weight.values_OI.shape
    return weight.scales.expand(-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))


GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """weight[o, i] = scales[o, g] * values[o, i]: float32 scales [O, 1] for whole rows, or float16 scales [O, G]."""

    values_OI: torch.Tensor  # int8; -128 occurs only in weights quantized elsewhere
    scales_OG: torch.Tensor

    @property
    def is_grouped(self) -> bool:
        return self.scales_OG.dtype is torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """weight[o, i] = scales[o, g] * values[o, i] + minima[o, g], or scales[o, g] * (values[o, i] - zeros[o, g])."""

    values_OI: torch.Tensor  # uint8, 0 to 15
    scales_OG: torch.Tensor  # float16
    # float16: minima. int8: zeros, 0 to 16; in float16, products of scales and zeros would lose bits.
    minima_OG: torch.Tensor

    @property
    def has_zeros(self) -> bool:
        return self.minima_OG.dtype is torch.int8


# A tensor: [O, I], float32 or bfloat16.
Weight = torch.Tensor | Int8Weight | Int4Weight | Fp8Weight


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP)


def quantize_int8(weight_OI: torch.Tensor) -> Int8Weight:
    """Quantizes symmetrically, with a scale per output: the largest number of a row becomes 127."""
    weight_OI = weight_OI.float()
    scales_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / 127
    # The clamp is for scales so small that they are inexact.
    values_OI = _divided(weight_OI, scales_O1).round_().clamp_(-127, 127)
    return Int8Weight(values_OI=values_OI.to(torch.int8), scales_OG=scales_O1)


def quantize_int4(weight_OI: torch.Tensor) -> Int4Weight:
    """Quantizes in groups: the least value of a group becomes 0, the largest 15."""
    groups_OGI = _grouped(weight_OI.float())
    minima_OG1 = groups_OGI.amin(dim=2, keepdim=True).half()
    scales_OG1 = ((groups_OGI.amax(dim=2, keepdim=True) - minima_OG1.float()) / 15).half()
    values_OGI = _divided(groups_OGI - minima_OG1.float(), scales_OG1.float()).round_().clamp_(0, 15)
    return Int4Weight(
        values_OI=values_OGI.to(torch.uint8).flatten(1)[:, : weight_OI.shape[1]].contiguous(),
        scales_OG=scales_OG1.squeeze(2),
        minima_OG=minima_OG1.squeeze(2),
    )


def dequantize(weight: Weight) -> torch.Tensor:
    """Returns [O, I]; float32 if the weight was quantized."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight)
    num_inputs = weight.values_OI.shape[1]
    scales_OI = _spread(weight.scales_OG, num_inputs)
    if isinstance(weight, Int8Weight):
        return weight.values_OI * scales_OI
    minima_OI = _spread(weight.minima_OG, num_inputs)
    if weight.has_zeros:
        return (weight.values_OI - minima_OI) * scales_OI
    return weight.values_OI * scales_OI + minima_OI


def map_tensors(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Applies `change` to each of the weight's tensors, for instance to move them to another device."""
    if isinstance(weight, torch.Tensor):
        return change(weight)
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(values_OI=change(weight.values_OI), scales=change(weight.scales))
    if isinstance(weight, Int8Weight):
        return Int8Weight(values_OI=change(weight.values_OI), scales_OG=change(weight.scales_OG))
    return Int4Weight(
        values_OI=change(weight.values_OI), scales_OG=change(weight.scales_OG), minima_OG=change(weight.minima_OG)
    )


def map_rows(weight: Weight, move: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Returns the weight with its outputs (dim 0) moved. FP8 with scales per block becomes floats."""
    return map_fp8_rows(weight, move) if isinstance(weight, Fp8Weight) else map_tensors(weight, move)


def concatenate(weights: Sequence[Weight]) -> Weight:
    """Concatenates the outputs of all. Quantized parts of different kinds (some checkpoints mix 4 and 8 bits) become 8
    bits with a scale per output, since kernels take one kind per layer. Beside an unquantized part they become floats:
    the maker of the checkpoint left that part out, or no integers express it."""
    if len(weights) == 1:
        return weights[0]
    floats = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(floats) == len(weights):
        return torch.cat(floats)
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    if len(fp8) == len(weights):
        return concatenate_fp8(fp8)
    if fp8:
        return torch.cat([dequantize(weight) for weight in weights])
    if floats:
        return torch.cat([dequantize(weight).to(floats[0].dtype) for weight in weights])
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(int8) == len(weights) and len({weight.is_grouped for weight in int8}) == 1:
        return Int8Weight(
            values_OI=torch.cat([weight.values_OI for weight in int8]),
            scales_OG=torch.cat([weight.scales_OG for weight in int8]),
        )
    int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if len(int4) == len(weights) and len({weight.has_zeros for weight in int4}) == 1:
        return Int4Weight(
            values_OI=torch.cat([weight.values_OI for weight in int4]),
            scales_OG=torch.cat([weight.scales_OG for weight in int4]),
            minima_OG=torch.cat([weight.minima_OG for weight in int4]),
        )
    return quantize_int8(torch.cat([dequantize(weight) for weight in weights]))


def _grouped(weight_OI: torch.Tensor) -> torch.Tensor:
    """Returns [O, G, 32]; a short last group repeats its last value, which changes neither minimum nor maximum."""
    missing = -weight_OI.shape[1] % GROUP
    if missing:
        weight_OI = torch.cat((weight_OI, weight_OI[:, -1:].expand(-1, missing)), dim=1)
    return weight_OI.unflatten(1, (-1, GROUP))


def _spread(scales_OG: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Returns float32 [O, I], or [O, 1] for scales of whole rows."""
    if scales_OG.shape[1] == 1:
        return scales_OG.float()
    return scales_OG.float().repeat_interleave(GROUP, dim=1)[:, :num_inputs]


def _divided(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight / scales, and 0 where a scale is 0: its weights are then 0, or too small for a float16 scale."""
    return torch.where(scales > 0, weight / scales, 0.0)


def slice_outputs(weight: Weight, part: slice) -> Weight:
    """Returns [part, I]. Raises ValueError if the part would cut e4m3 blocks."""
    match weight:
        case Int8Weight():
            return Int8Weight(values_OI=weight.values_OI[part], scales_OG=weight.scales_OG[part])
        case Int4Weight():
            return Int4Weight(
                values_OI=weight.values_OI[part], scales_OG=weight.scales_OG[part], minima_OG=weight.minima_OG[part]
            )
        case Fp8Weight():
            scales = weight.scales
            if weight.has_blocks:
                scales = scales[_groups(part, BLOCK, len(weight.values_OI), "outputs")]
            elif len(scales) > 1:
                scales = scales[part]
            return Fp8Weight(values_OI=weight.values_OI[part], scales=scales)
    # A copy, so that the whole weight can be freed.
    return weight[part].clone()


def slice_inputs(weight: Weight, part: slice) -> Weight:
    """Returns [O, part], contiguous. Raises ValueError if the part would cut groups or blocks."""
    if isinstance(weight, torch.Tensor):
        return weight[:, part].contiguous()
    num_inputs = weight.values_OI.shape[1]
    values_OI = weight.values_OI[:, part].contiguous()
    if isinstance(weight, Fp8Weight):
        scales = weight.scales
        if weight.has_blocks:
            scales = scales[:, _groups(part, BLOCK, num_inputs, "inputs")].contiguous()
        return Fp8Weight(values_OI=values_OI, scales=scales)
    groups = slice(None) if weight.scales_OG.shape[1] == 1 else _groups(part, GROUP, num_inputs, "inputs")
    scales_OG = weight.scales_OG[:, groups].contiguous()
    if isinstance(weight, Int8Weight):
        return Int8Weight(values_OI=values_OI, scales_OG=scales_OG)
    return Int4Weight(values_OI=values_OI, scales_OG=scales_OG, minima_OG=weight.minima_OG[:, groups].contiguous())


def _groups(part: slice, size: int, total: int, what: str) -> slice:
    if part.start % size or (part.stop % size and part.stop != total):
        raise ValueError(
            f"{what} {part.start} to {part.stop - 1} of {total} would cut groups of {size} that share a scale: use a "
            f"tensor_parallel_size whose parts are multiples of {size}"
        )
    return slice(part.start // size, -(-part.stop // size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight packed for the C++ kernels of one path and build. kind: their number of the kind of weight."""

    kind: int
    num_rows: int
    num_inputs: int
    panels: torch.Tensor  # uint8 [bytes]
