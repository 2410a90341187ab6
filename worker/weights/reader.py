"""The interface through which layers read their weights, from any source."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.linear.weights import PackedWeight, Weight


class WeightsError(ValueError):
    """A weight file is missing, damaged, or of another model. The message names the file and the problem."""


def some(names: list[str]) -> str:
    """Joins the first few of `names`, for a message."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


Shape = tuple[int, ...]


class WeightReader(Protocol):
    """Returns tensors by their Hugging Face names, on the device that computes; the caller may keep them."""

    def __call__(self, name: str) -> torch.Tensor:
        """Returns a tensor in the model's dtype."""
        ...

    def float32(self, name: str) -> torch.Tensor:
        """Returns a tensor in float32 whatever the model's dtype: for small tensors whose last bits matter."""
        ...

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        """Returns a linear layer's weight, in the model's quantization. outputs, inputs: a rank's part; only it is
        read, as far as possible. Raises ValueError for a part that would split numbers with a common scale."""
        ...

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        """Returns the output head's weight: with 4-bit quantization it has 8 bits, with FP8 it stays in floats."""
        ...

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        """Returns the scales of keys and of values for an e4m3 KV cache: number = scale * stored. None: the checkpoint
        has none, so use 1; a warning is logged. attention: such as model.layers.3.self_attn. Raises WeightsError for
        scales that are not positive numbers."""
        ...

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        """Returns the packed weight that an earlier start gave to `keep` for the weights `names`, side by side; None:
        the caller must pack them."""
        ...

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """May keep a packed weight for the next start."""
        ...


class AdaptedReader:
    """A WeightReader that reads through another one; subclasses convert some tensors."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def __call__(self, name: str) -> torch.Tensor:
        return self._reader(name)

    def float32(self, name: str) -> torch.Tensor:
        return self._reader.float32(name)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._reader.weight(name, outputs, inputs)

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self._reader.head_weight(name, outputs)

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return self._reader.kv_scale(attention)

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return self._reader.packed(names)

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        self._reader.keep(names, packed)


class NormsPlusOne(AdaptedReader):
    """Adds 1 to norms: checkpoints of Gemma's family store norm weights minus 1."""

    def __call__(self, name: str) -> torch.Tensor:
        tensor = super().__call__(name)
        return 1.0 + tensor.float() if name.endswith("norm.weight") else tensor
