"""Quantized weights of linear layers, before they are packed for a machine: as checkpoints hold them, or as made here
from floats.

A group is 32 inputs that lie together; the last one of a row may be shorter. A float16 scale keeps its bits when it is
packed; GGUF's scales are float16.
Legend: O outputs, I inputs, G groups of a row, ceil(I / 32).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.linear.fp8_weight import Fp8Weight, concatenate_fp8, dequantize_fp8, map_fp8_rows

GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """weight[o, i] = scales[o, g] * values[o, i]: with float32 scales [O, 1] of whole rows, or float16 ones [O, G]."""

    values_OI: torch.Tensor  # int8; -128 is made by others only
    scales_OG: torch.Tensor

    @property
    def is_grouped(self) -> bool:
        return self.scales_OG.dtype is torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """weight[o, i] = scales[o, g] * values[o, i] + minima[o, g]."""

    values_OI: torch.Tensor  # uint8, 0 to 15
    scales_OG: torch.Tensor  # float16
    minima_OG: torch.Tensor  # float16


# A tensor: [O, I], float32 or bfloat16.
Weight = torch.Tensor | Int8Weight | Int4Weight | Fp8Weight


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP)


def quantize_int8(weight_OI: torch.Tensor) -> Int8Weight:
    """Symmetric, a scale for each output: the largest of a row becomes 127."""
    weight_OI = weight_OI.float()
    scales_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / 127
    # The clamp is for scales so small that they are rounded themselves.
    values_OI = _divided(weight_OI, scales_O1).round_().clamp_(-127, 127)
    return Int8Weight(values_OI=values_OI.to(torch.int8), scales_OG=scales_O1)


def quantize_int4(weight_OI: torch.Tensor) -> Int4Weight:
    """From each group's least value, which becomes 0, to its largest, which becomes 15."""
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
    """[O, I]; float32 if it was quantized."""
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight)
    num_inputs = weight.values_OI.shape[1]
    scales_OI = _spread(weight.scales_OG, num_inputs)
    if isinstance(weight, Int8Weight):
        return weight.values_OI * scales_OI
    return weight.values_OI * scales_OI + _spread(weight.minima_OG, num_inputs)


def map_tensors(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """With all that it consists of changed; on another device, say."""
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
    """With the outputs (dim 0) moved. FP8 with scales of blocks becomes floats."""
    return map_fp8_rows(weight, move) if isinstance(weight, Fp8Weight) else map_tensors(weight, move)


def concatenate(weights: Sequence[Weight]) -> Weight:
    """The outputs of all, side by side. Quantized parts of different kinds (some checkpoints hold one in 4 bits and
    its neighbour in 8) become 8 bits with a scale for each output: kernels take one kind a layer. FP8 beside a part
    that was left in floats becomes floats, too."""
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
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(int8) == len(weights) and len({weight.is_grouped for weight in int8}) == 1:
        return Int8Weight(
            values_OI=torch.cat([weight.values_OI for weight in int8]),
            scales_OG=torch.cat([weight.scales_OG for weight in int8]),
        )
    int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if len(int4) == len(weights):
        return Int4Weight(
            values_OI=torch.cat([weight.values_OI for weight in int4]),
            scales_OG=torch.cat([weight.scales_OG for weight in int4]),
            minima_OG=torch.cat([weight.minima_OG for weight in int4]),
        )
    return quantize_int8(torch.cat([dequantize(weight) for weight in weights]))


def _grouped(weight_OI: torch.Tensor) -> torch.Tensor:
    """[O, G, 32]; a short last group repeats its last value, which changes neither its least nor its largest."""
    missing = -weight_OI.shape[1] % GROUP
    if missing:
        weight_OI = torch.cat((weight_OI, weight_OI[:, -1:].expand(-1, missing)), dim=1)
    return weight_OI.unflatten(1, (-1, GROUP))


def _spread(scales_OG: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """float32 [O, I], or [O, 1] of a scale for whole rows."""
    if scales_OG.shape[1] == 1:
        return scales_OG.float()
    return scales_OG.float().repeat_interleave(GROUP, dim=1)[:, :num_inputs]


def _divided(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Where a scale is 0 all of its weights are 0, or so near that float16 has no scale for them."""
    return torch.where(scales > 0, weight / scales, 0.0)
