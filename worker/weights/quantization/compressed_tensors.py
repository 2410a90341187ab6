"""quantization_config of compressed-tensors (vllm-project/compressed-tensors), as llm-compressor writes it."""

from typing import Any

import msgspec

from worker.weights.quantization.fp8 import positive
from worker.weights.quantization.groups import check_integers
from worker.weights.quantization.layers import Scheme, StoredQuantization, check_patterns
from worker.weights.quantization.mxfp4 import MXFP4_PACKED
from worker.weights.quantization.pack_quantized import PackQuantizedScheme
from worker.weights.quantization.scaled import ScaledScheme


class _Numbers(msgspec.Struct, kw_only=True):
    """The numeric format of weights or of inputs."""

    num_bits: int
    type: str
    strategy: str | None = None
    symmetric: bool = True
    block_structure: tuple[int, int] | None = None
    group_size: int | None = None
    actorder: str | bool | None = None


class _Group(msgspec.Struct, kw_only=True):
    targets: tuple[str, ...]
    weights: _Numbers
    input_activations: _Numbers | None = None
    format: str | None = None

    def scheme(self, stored_format: str) -> Scheme:
        if stored_format == _PACKED_FORMAT:
            return self._packed()
        if stored_format == _MXFP4_FORMAT:
            return self._mxfp4()
        weights, inputs = self.weights, self.input_activations
        if weights.num_bits != 8 or weights.type not in ("float", "int"):
            raise ValueError(f"{weights.type} weights of {weights.num_bits} bits are not supported; only 8 bits are")
        if not weights.symmetric:
            raise ValueError("asymmetric weights are not supported; symmetric ones are")
        strategy = weights.strategy or "tensor"
        blocks = {"tensor": (0, 0), "channel": (1, 0)}
        if weights.type == "float":
            blocks["block"] = positive(weights.block_structure or (128, 128), "block_structure")
        if strategy not in blocks:
            raise ValueError(
                f"strategy={strategy!r} of {weights.type} weights is not supported; {', '.join(blocks)} are"
            )
        return ScaledScheme(
            kind="I8" if weights.type == "int" else "F8_E4M3",
            block=blocks[strategy],
            has_int8_inputs=inputs is not None and (inputs.type, inputs.num_bits) == ("int", 8),
        )

    def _packed(self) -> Scheme:
        weights, strategy = self.weights, self.weights.strategy or "tensor"
        if weights.type != "int":
            raise ValueError(f"{weights.type} weights in format={_PACKED_FORMAT} are not supported; int is")
        if strategy not in ("group", "channel"):
            raise ValueError(f"strategy={strategy!r} in format={_PACKED_FORMAT} is not supported; group, channel are")
        group_size = -1 if strategy == "channel" else weights.group_size
        if group_size is None:
            raise ValueError("group_size is missing; strategy='group' needs it")
        check_integers(weights.num_bits, group_size)
        return PackQuantizedScheme(
            bits=weights.num_bits,
            group_size=group_size,
            symmetric=weights.symmetric,
            # With other orders, groups are adjacent inputs.
            has_order=weights.actorder in (True, "group", "dynamic"),
        )

    def _mxfp4(self) -> Scheme:
        weights = self.weights
        if (weights.type, weights.num_bits, weights.group_size) != ("float", 4, 32):
            raise ValueError(
                f"{weights.type} weights of {weights.num_bits} bits in groups of {weights.group_size} are not "
                f"supported in format={_MXFP4_FORMAT}; float, 4 bits, groups of 32 are"
            )
        return MXFP4_PACKED

    def described(self, stored_format: str) -> str:
        """Describes the layout for the log."""
        weights = self.weights
        groups = f", groups of {weights.group_size}" if weights.strategy == "group" else f", by {weights.strategy}"
        return f"compressed-tensors {stored_format}, {weights.num_bits} bits{groups}"


# Formats with one byte per weight.
_PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_FORMAT, _MXFP4_FORMAT = "pack-quantized", "mxfp4-pack-quantized"
_FORMATS = (*_PLAIN_FORMATS, _PACKED_FORMAT, _MXFP4_FORMAT)


class CompressedTensors(msgspec.Struct, kw_only=True):
    config_groups: dict[str, _Group]
    format: str | None = None
    ignore: tuple[str, ...] = ()
    transform_config: dict[str, Any] | None = None

    def stored(self) -> StoredQuantization:
        if self.transform_config:
            raise ValueError("transform_config: rotated weights are not supported")
        schemes, described = [], []
        for name, group in self.config_groups.items():
            stored_format = group.format or self.format or _PLAIN_FORMATS[0]
            if stored_format not in (*_FORMATS, "mixed-precision"):
                raise ValueError(f"format={stored_format!r} is not supported; {', '.join(_FORMATS)} are")
            try:
                schemes.append((group.targets, group.scheme(stored_format)))
                described.append(group.described(stored_format))
            except ValueError as error:
                raise ValueError(f"config_groups.{name}: {error}") from None
        check_patterns([*self.ignore, *(pattern for targets, _ in schemes for pattern in targets)])
        return StoredQuantization(
            schemes=tuple(schemes), ignored=self.ignore, description=" and ".join(dict.fromkeys(described))
        )
