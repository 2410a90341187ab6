"""Converts Gemma 3's tensors to the form that layers read."""

from collections.abc import Sequence

import torch

from kernels.linear.weights import PackedWeight, Weight
from worker.weights.reader import WeightReader


class NormsPlusOne:
    """A WeightReader that adds 1 to norms: Gemma 3's checkpoints store norm weights minus 1."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._reader(name)
        return 1.0 + tensor.float() if name.endswith("norm.weight") else tensor

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
