"""Quantizations: how a checkpoint stores weights, and which kind a backend computes with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec
import torch

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
from worker.weights.reader import Shape, WeightsError

Quantization = Literal["none", "int8", "int4", "fp8"]
# auto: what the checkpoint was made for.
QuantizationOption = Literal["auto", "none", "int8", "int4", "fp8"]
QUANTIZATION_OPTIONS: tuple[str, ...] = get_args(QuantizationOption)

_ON_CPUS: tuple[Quantization, ...] = ("none", "int8", "int4")
_ON_GPUS: tuple[Quantization, ...] = ("none", "fp8")
_LARGEST_HALF = torch.finfo(torch.float16).max


def resolve_quantization(option: QuantizationOption, made_for: Quantization, backend: Backend) -> Quantization:
    """Returns the quantization that `option` means on this backend, for a checkpoint made for `made_for`. Raises
    WeightsError for one that the backend does not support."""
    offered = _ON_CPUS if backend.gpu is None else _ON_GPUS
    if option == "auto":
        can = made_for in offered and (made_for != "fp8" or has_e4m3(backend.device))
        return made_for if can else "none"
    if option not in offered:
        where, other = ("CPU", "a GPU") if backend.gpu is None else ("GPU", "a CPU")
        raise WeightsError(
            f"quantization={option} is computed on {other} only, and this is a {where} ({backend.name}): "
            f"use quantization={offered[1]}, or one of auto, {', '.join(offered)}"
        )
    if option == "fp8":
        try:
            check_device(backend.device)
        except ValueError as error:
            raise WeightsError(f"quantization=fp8: {error}") from None
    return option


def quantized(stored: Weight, quantization: Literal["int8", "int4", "fp8"]) -> Weight:
    """Quantizes a stored weight, in float32. A weight that is already stored in this quantization stays as it is.

    With int4, a weight with numbers beyond float16 gets 8 bits, because int4's scales and minima are float16.
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
    """Quantizes an expert to fp8 if possible. Grouped GEMMs take e4m3 only in whole blocks: experts of other sizes, and
    experts stored with a scale per output, become floats, because rounding these again would gain nothing."""
    num_outputs, num_inputs = (stored if isinstance(stored, torch.Tensor) else stored.values_OI).shape
    blocks = None
    if num_outputs % BLOCK == num_inputs % BLOCK == 0:
        blocks = in_blocks(stored) if isinstance(stored, Fp8Weight) else quantize_fp8_blocks(dequantize(stored))
    return dequantize(stored) if blocks is None else blocks


def head_quantization(quantization: Quantization) -> Quantization:
    """Returns the output head's quantization. The head chooses the token, so 4 bits cost it more accuracy than a layer;
    checkpoints keep it at 6 or 8 bits, and FP8 checkpoints keep it in floats."""
    head: dict[Quantization, Quantization] = {"int4": "int8", "fp8": "none"}
    return head.get(quantization, quantization)


# Outputs and inputs that share a scale in e4m3 as GPUs compute with it: a tensor, a channel, a block; 0: all.
FP8_BLOCKS = ((0, 0), (1, 0), (BLOCK, BLOCK))
# safetensors' names of the two kinds of stored weights.
StoredKind = Literal["F8_E4M3", "I8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """weight[o, i] = stored[o, i] * the scale of its block."""

    kind: StoredKind
    # The scales of layer.weight are layer.weight_scale, or the first of these names that the file has.
    scale_names: tuple[str, ...] = ("weight_scale",)
    # Outputs and inputs that share a scale; 0: all.
    block: tuple[int, int]
    # The checkpoint was made for inputs in 8-bit integers.
    has_int8_inputs: bool = False

    def scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Returns the possible shapes of the scales of a weight of `shape`, the usual one first."""
        if self.block == (0, 0):
            return (1,), ()
        return (tuple(-(-size // (step or size)) for size, step in zip(shape, self.block, strict=True)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How each layer is stored: by the first scheme whose targets match."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    # Layers that are stored as floats: names, or re: and a regular expression.
    ignored: tuple[str, ...] = ()

    def scheme_of(self, layer: str) -> Scheme | None:
        """Returns a layer's scheme; None: it is stored as floats. layer: the name of its weight without ".weight", such
        as model.layers.3.mlp.up_proj."""
        if any(_names(pattern, layer) for pattern in self.ignored):
            return None
        for targets, scheme in self.schemes:
            if any(target == "Linear" or _names(target, layer) for target in targets):
                return scheme
        return None

    @property
    def made_for(self) -> Quantization:
        """The quantization that the checkpoint was made for: int8 if its inputs were calibrated for that, fp8 if GPU
        kernels take all quantized weights as they are stored."""
        schemes = [scheme for _, scheme in self.schemes]
        if schemes and all(scheme.has_int8_inputs for scheme in schemes):
            return "int8"
        if schemes and all(scheme.kind == "F8_E4M3" and scheme.block in FP8_BLOCKS for scheme in schemes):
            return "fp8"
        return "none"


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization:
    """Reads quantization_config from a config.json. Raises ValueError if it is not supported."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return StoredQuantization()
    method = raw.get("quant_method") if isinstance(raw, Mapping) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"quantization_config: quant_method={method!r} is not supported; {', '.join(_METHODS)} and GGUF files are"
        )
    try:
        return msgspec.convert(raw, _METHODS[method]).stored()
    except (ValueError, re.error) as error:
        raise ValueError(f"quantization_config ({method}): {error}") from None


class _Skipping(msgspec.Struct, kw_only=True):
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    def skipped(self) -> tuple[str, ...]:
        # These methods never quantize the head, listed or not, and DeepSeek-V3's files do not quantize routers.
        return ("lm_head", "mlp.gate", *(self.modules_to_not_convert or ()), *(self.ignored_layers or ()))


class _Fp8(_Skipping, kw_only=True):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] | None = None

    def stored(self) -> StoredQuantization:
        if self.fmt != "e4m3":
            raise ValueError(f"fmt={self.fmt!r} is not supported; e4m3 is")
        # For whole tensors, AutoFP8 names the scale weight_scale, transformers weight_scale_inv; both are factors.
        scheme = Scheme(kind="F8_E4M3", block=(0, 0), scale_names=("weight_scale", "weight_scale_inv"))
        if self.weight_block_size is not None:
            block = _sizes(self.weight_block_size, "weight_block_size")
            scheme = Scheme(kind="F8_E4M3", block=block, scale_names=("weight_scale_inv",))
        return StoredQuantization(schemes=((("Linear",), scheme),), ignored=self.skipped())


class _FbgemmFp8(_Skipping, kw_only=True):
    def stored(self) -> StoredQuantization:
        scheme = Scheme(kind="F8_E4M3", block=(1, 0))
        return StoredQuantization(schemes=((("Linear",), scheme),), ignored=self.skipped())


class _Numbers(msgspec.Struct, kw_only=True):
    """The numeric format of weights or of inputs."""

    num_bits: int
    type: str
    strategy: str | None = None
    symmetric: bool = True
    block_structure: tuple[int, int] | None = None


class _Group(msgspec.Struct, kw_only=True):
    targets: tuple[str, ...]
    weights: _Numbers
    input_activations: _Numbers | None = None
    format: str | None = None

    def scheme(self) -> Scheme:
        weights, inputs = self.weights, self.input_activations
        if weights.num_bits != 8 or weights.type not in ("float", "int"):
            raise ValueError(f"{weights.type} weights of {weights.num_bits} bits are not supported; only 8 bits are")
        if not weights.symmetric:
            raise ValueError("asymmetric weights are not supported; symmetric ones are")
        strategy = weights.strategy or "tensor"
        blocks = {"tensor": (0, 0), "channel": (1, 0)}
        if weights.type == "float":
            blocks["block"] = _sizes(weights.block_structure or (128, 128), "block_structure")
        if strategy not in blocks:
            raise ValueError(
                f"strategy={strategy!r} of {weights.type} weights is not supported; {', '.join(blocks)} are"
            )
        return Scheme(
            kind="I8" if weights.type == "int" else "F8_E4M3",
            block=blocks[strategy],
            has_int8_inputs=inputs is not None and (inputs.type, inputs.num_bits) == ("int", 8),
        )


# Formats with one byte per weight.
_PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


class _CompressedTensors(msgspec.Struct, kw_only=True):
    config_groups: dict[str, _Group]
    format: str | None = None
    ignore: tuple[str, ...] = ()
    transform_config: dict[str, Any] | None = None

    def stored(self) -> StoredQuantization:
        if self.transform_config:
            raise ValueError("transform_config: rotated weights are not supported")
        schemes = []
        for name, group in self.config_groups.items():
            stored_format = group.format or self.format or _PLAIN_FORMATS[0]
            if stored_format not in (*_PLAIN_FORMATS, "mixed-precision"):
                raise ValueError(f"format={stored_format!r} is not supported; {', '.join(_PLAIN_FORMATS)} are")
            try:
                schemes.append((group.targets, group.scheme()))
            except ValueError as error:
                raise ValueError(f"config_groups.{name}: {error}") from None
        patterns = [pattern for targets, _ in schemes for pattern in targets]
        for pattern in (*self.ignore, *patterns):
            if pattern.startswith("re:"):
                _compiled(pattern)
        return StoredQuantization(schemes=tuple(schemes), ignored=self.ignore)


_METHODS: dict[str, type[_Fp8] | type[_FbgemmFp8] | type[_CompressedTensors]] = {
    "fp8": _Fp8,
    "fbgemm_fp8": _FbgemmFp8,
    "compressed-tensors": _CompressedTensors,
}


def _sizes(block: tuple[int, int], name: str) -> tuple[int, int]:
    if min(block) < 1:
        raise ValueError(f"{name}={list(block)} must be positive")
    return block


def _names(pattern: str, layer: str) -> bool:
    """Returns True if a pattern is a layer's name, a module around it (model.layers.3) or its short name (lm_head)."""
    if pattern.startswith("re:"):
        return _compiled(pattern).match(layer) is not None
    return layer == pattern or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
