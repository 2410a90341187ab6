"""Quantizations that backends compute with."""

from collections.abc import Callable
from typing import get_args

import torch

from configs.quantization import Quantization, QuantizationName, QuantizationOption, offered
from kernels.backend import Backend
from kernels.gemm.quantize.checks import check_device, has_e4m3
from kernels.linear.weights import (
    BLOCK,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Weight,
    dequantize,
    in_blocks,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_int4,
    quantize_int8,
)
from worker.weights.reader import WeightsError

QUANTIZATION_OPTIONS: tuple[str, ...] = get_args(QuantizationOption)
# A kind's weights, and the function that makes one of floats.
_WEIGHTS: dict[QuantizationName, tuple[type[Weight], Callable[[torch.Tensor], Weight]]] = {
    "int8": (Int8Weight, quantize_int8),
    "fp8": (Fp8Weight, quantize_fp8),
    "int4": (Int4Weight, quantize_int4),
}
_LARGEST_HALF = torch.finfo(torch.float16).max


def resolve_quantization(option: QuantizationOption, made_for: Quantization, backend: Backend) -> Quantization:
    """Returns the quantization that `option` means on this backend, for a checkpoint made for `made_for`. Raises
    WeightsError for one that the backend does not support."""
    kinds = offered(on_gpu=backend.gpu is not None)
    if option == "auto":
        can = made_for in kinds and (made_for != "fp8" or has_e4m3(backend.device))
        return made_for if can else "none"
    if option not in kinds:
        where, other = ("CPU", "a GPU") if backend.gpu is None else ("GPU", "a CPU")
        raise WeightsError(
            f"quantization={option} is computed on {other} only, and this is a {where} ({backend.name}): "
            f"use quantization={kinds[1]}, or one of auto, {', '.join(kinds)}"
        )
    if option == "fp8":
        try:
            check_device(backend.device)
        except ValueError as error:
            raise WeightsError(f"quantization=fp8: {error}") from None
    return option


def quantized(stored: Weight, quantization: QuantizationName) -> Weight:
    """Quantizes a stored weight, in float32. A weight that is already stored in this quantization stays as it is.

    With int4, a weight with numbers beyond float16 gets 8 bits, because int4's scales and minima are float16.
    """
    kind, quantize = _WEIGHTS[quantization]
    if isinstance(stored, kind):
        return stored
    floats_OI = dequantize(stored)
    if quantization == "int4" and floats_OI.abs().max() > _LARGEST_HALF:
        return quantize_int8(floats_OI)
    return quantize(floats_OI)


def quantized_expert(stored: Weight) -> Weight:
    """Quantizes an expert to fp8 if possible. Grouped GEMMs take e4m3 only in whole blocks: experts of other sizes, and
    experts stored with a scale per output, become floats, because rounding these again would gain nothing."""
    num_outputs, num_inputs = (stored if isinstance(stored, torch.Tensor) else stored.values_OI).shape
    blocks = None
    if num_outputs % BLOCK == num_inputs % BLOCK == 0:
        blocks = in_blocks(stored) if isinstance(stored, Fp8Weight) else quantize_fp8_blocks(dequantize(stored))
    return dequantize(stored) if blocks is None else blocks


def head_quantization(quantization: Quantization, *, on_gpu: bool = False) -> Quantization:
    """Returns the output head's quantization. The head chooses the token, so 4 bits cost it more accuracy than a layer;
    checkpoints keep it at 6 or 8 bits, and FP8 checkpoints keep it in floats. GPUs have no kernel of 8-bit integers."""
    head: dict[Quantization, Quantization] = {"int4": "none" if on_gpu else "int8", "fp8": "none"}
    return head.get(quantization, quantization)
