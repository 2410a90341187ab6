"""How a safetensors checkpoint holds its linear layers: quantization_config in its config.json.

Formats: huggingface/transformers, integrations/finegrained_fp8.py and fbgemm_fp8.py; vllm-project/compressed-tensors.
Legend: O outputs, I inputs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec

from kernels.linear.fp8_weight import BLOCK
from worker.take_tensor import Shape
from worker.weights.quantization import Quantization

# Outputs and inputs that share a scale in e4m3 as GPUs compute with it: a tensor, a channel, a block; 0: all.
FP8_BLOCKS = ((0, 0), (1, 0), (BLOCK, BLOCK))
# What safetensors calls the two kinds of stored weights.
StoredKind = Literal["F8_E4M3", "I8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """weight[o, i] = stored[o, i] * the scale of its block."""

    kind: StoredKind
    # The scales of layer.weight are layer.weight_scale, or of whichever of these names there is.
    scale_names: tuple[str, ...] = ("weight_scale",)
    # Outputs and inputs that share a scale; 0: all.
    block: tuple[int, int]
    # The checkpoint was made for inputs in 8-bit integers.
    has_int8_inputs: bool = False

    def scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Of a weight of `shape`: the usual one first."""
        if self.block == (0, 0):
            return (1,), ()
        return (tuple(-(-size // (step or size)) for size, step in zip(shape, self.block, strict=True)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """Which layers are stored how. The first scheme counts whose targets match."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    # Layers that are stored as floats: their names, or re: and a regular expression.
    ignored: tuple[str, ...] = ()

    def scheme_of(self, layer: str) -> Scheme | None:
        """layer: such as model.layers.3.mlp.up_proj, the name of its weight without ".weight". None: floats."""
        if any(_names(pattern, layer) for pattern in self.ignored):
            return None
        for targets, scheme in self.schemes:
            if any(target == "Linear" or _names(target, layer) for target in targets):
                return scheme
        return None

    @property
    def made_for(self) -> Quantization:
        """int8 if inputs were calibrated for it, fp8 if a GPU's kernels take all that is quantized as it is stored."""
        schemes = [scheme for _, scheme in self.schemes]
        if schemes and all(scheme.has_int8_inputs for scheme in schemes):
            return "int8"
        if schemes and all(scheme.kind == "F8_E4M3" and scheme.block in FP8_BLOCKS for scheme in schemes):
            return "fp8"
        return "none"


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization:
    """From a config.json. Raises ValueError for what is not supported."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return StoredQuantization()
    method = raw.get("quant_method") if isinstance(raw, Mapping) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"quantization_config: quant_method={method!r} is not supported; {', '.join(_METHODS)} are, and GGUF files"
        )
    try:
        return msgspec.convert(raw, _METHODS[method]).stored()
    except (ValueError, re.error) as error:
        raise ValueError(f"quantization_config ({method}): {error}") from None


class _Skipping(msgspec.Struct, kw_only=True):
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    def skipped(self) -> tuple[str, ...]:
        # These methods leave the head alone whether they say so or not, and DeepSeek-V3 its routers.
        return ("lm_head", "mlp.gate", *(self.modules_to_not_convert or ()), *(self.ignored_layers or ()))


class _Fp8(_Skipping, kw_only=True):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] | None = None

    def stored(self) -> StoredQuantization:
        if self.fmt != "e4m3":
            raise ValueError(f"fmt={self.fmt!r} is not supported; e4m3 is")
        # Of whole tensors, AutoFP8 calls them weight_scale, transformers weight_scale_inv; either is multiplied with.
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
    """Of weights, or of inputs."""

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
            raise ValueError(f"{weights.type} weights of {weights.num_bits} bits are not supported; of 8 bits they are")
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


# Formats that hold a byte a weight.
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
    """Whether a pattern is the layer's name, a module around it (model.layers.3), or its own short name (lm_head)."""
    if pattern.startswith("re:"):
        return _compiled(pattern).match(layer) is not None
    return layer == pattern or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
