"""Which weights a quantization gives for what a checkpoint holds."""

from typing import Literal, get_args

from kernels.linear.weights import Int4Weight, Int8Weight, Weight, dequantize, quantize_int4, quantize_int8

Quantization = Literal["none", "int8", "int4"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


def quantized(stored: Weight, quantization: Literal["int8", "int4"]) -> Weight:
    """What the checkpoint holds in 8 bits stays as it is in either quantization, and in 4 bits under int4: nothing is
    lost. All else is made from floats."""
    if isinstance(stored, Int8Weight) or (quantization == "int4" and isinstance(stored, Int4Weight)):
        return stored
    return (quantize_int8 if quantization == "int8" else quantize_int4)(dequantize(stored))


def head_quantization(quantization: Quantization) -> Quantization:
    """The head chooses the token: 4 bits cost it more than they cost a layer, and checkpoints keep it at 6 or 8."""
    return "int8" if quantization == "int4" else quantization
