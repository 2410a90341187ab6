"""quantization_config of compressed-tensors (vllm-project/compressed-tensors), as llm-compressor writes it."""

from typing import Any

import msgspec

from worker.weights.quantization.fp8 import positive
from worker.weights.quantization.layers import Scheme, StoredQuantization, check_patterns
from worker.weights.quantization.scaled import ScaledScheme


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


# Formats with one byte per weight.
_PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


class CompressedTensors(msgspec.Struct, kw_only=True):
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
        check_patterns([*self.ignore, *(pattern for targets, _ in schemes for pattern in targets)])
        return StoredQuantization(schemes=tuple(schemes), ignored=self.ignore)
