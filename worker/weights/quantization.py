"""Which weights a quantization gives for what a checkpoint holds."""

from typing import Literal, get_args

import torch

from kernels.linear.weights import Int4Weight, Int8Weight, Weight, dequantize, quantize_int4, quantize_int8

Quantization = Literal["none", "int8", "int4"]
# auto: what the checkpoint was made for.
QuantizationOption = Literal["auto", "none", "int8", "int4"]
QUANTIZATION_OPTIONS: tuple[str, ...] = get_args(QuantizationOption)

_LARGEST_HALF = torch.finfo(torch.float16).max


def quantized(stored: Weight, quantization: Literal["int8", "int4"]) -> Weight:
    """What the checkpoint holds in as many bits stays as it is; all else is made from floats, in float32.

    int4 leaves a weight with numbers beyond float16, of which its scales and minima are, at 8 bits.
    """
    if isinstance(stored, Int8Weight if quantization == "int8" else Int4Weight):
        return stored
    floats_OI = dequantize(stored)
    if quantization == "int4" and floats_OI.abs().max() <= _LARGEST_HALF:
        return quantize_int4(floats_OI)
    return quantize_int8(floats_OI)


def head_quantization(quantization: Quantization) -> Quantization:
    """The head chooses the token: 4 bits cost it more than they cost a layer, and checkpoints keep it at 6 or 8."""
    return "int8" if quantization == "int4" else quantization
