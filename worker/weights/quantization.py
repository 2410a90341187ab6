"""Which weights a quantization gives for what a checkpoint holds, and which quantization a path computes."""

from typing import Literal, get_args

import torch

from kernels.compute_path import ComputePath
from kernels.fp8_quantize.checks import check_device, has_e4m3
from kernels.linear.fp8_weight import BLOCK, Fp8Weight, in_blocks, quantize_fp8, quantize_fp8_blocks
from kernels.linear.weights import Int4Weight, Int8Weight, Weight, dequantize, quantize_int4, quantize_int8
from worker.weights.errors import WeightsError

Quantization = Literal["none", "int8", "int4", "fp8"]
# auto: what the checkpoint was made for.
QuantizationOption = Literal["auto", "none", "int8", "int4", "fp8"]
QUANTIZATION_OPTIONS: tuple[str, ...] = get_args(QuantizationOption)

_ON_CPUS: tuple[Quantization, ...] = ("none", "int8", "int4")
_ON_GPUS: tuple[Quantization, ...] = ("none", "fp8")
_LARGEST_HALF = torch.finfo(torch.float16).max


def resolve_quantization(option: QuantizationOption, made_for: Quantization, path: ComputePath) -> Quantization:
    """What `option` means for a checkpoint made for `made_for` on this path. Raises WeightsError for what the path does
    not compute."""
    offered = _ON_CPUS if path.gpu is None else _ON_GPUS
    if option == "auto":
        can = made_for in offered and (made_for != "fp8" or has_e4m3(path.device))
        return made_for if can else "none"
    if option not in offered:
        where, other = ("CPU", "a GPU") if path.gpu is None else ("GPU", "a CPU")
        raise WeightsError(
            f"quantization={option} is computed on {other} only, and this is a {where} ({path.name}): "
            f"quantization={offered[1]} is what works here, or one of auto, {', '.join(offered)}"
        )
    if option == "fp8":
        try:
            check_device(path.device)
        except ValueError as error:
            raise WeightsError(f"quantization=fp8: {error}") from None
    return option


def quantized(stored: Weight, quantization: Literal["int8", "int4", "fp8"]) -> Weight:
    """What the checkpoint holds in as many bits stays as it is; all else is made from floats, in float32.

    int4 leaves a weight with numbers beyond float16, of which its scales and minima are, at 8 bits.
    """
    if isinstance(stored, {"int8": Int8Weight, "int4": Int4Weight, "fp8": Fp8Weight}[quantization]):
        return stored
    floats_OI = dequantize(stored)
    if quantization == "fp8":
        return quantize_fp8(floats_OI)
    if quantization == "int4" and floats_OI.abs().max() <= _LARGEST_HALF:
        return quantize_int4(floats_OI)
    return quantize_int8(floats_OI)


def quantized_expert(stored: Weight) -> Weight:
    """fp8 of an expert. Grouped GEMMs take e4m3 in blocks alone, and whole ones: experts of other sizes, and those that
    the checkpoint holds with scales of outputs, are floats, for rounding them again would gain nothing over those."""
    num_outputs, num_inputs = (stored if isinstance(stored, torch.Tensor) else stored.values_OI).shape
    blocks = None
    if num_outputs % BLOCK == num_inputs % BLOCK == 0:
        blocks = in_blocks(stored) if isinstance(stored, Fp8Weight) else quantize_fp8_blocks(dequantize(stored))
    return dequantize(stored) if blocks is None else blocks


def head_quantization(quantization: Quantization) -> Quantization:
    """The head chooses the token: 4 bits cost it more than they cost a layer, and checkpoints keep it at 6 or 8; those
    in FP8 keep it in floats."""
    head: dict[Quantization, Quantization] = {"int4": "int8", "fp8": "none"}
    return head.get(quantization, quantization)
