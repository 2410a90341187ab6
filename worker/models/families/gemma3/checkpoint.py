"""Tensors of Gemma 3 as its layers read them."""

from collections.abc import Sequence

import torch

from kernels.linear.weights import PackedWeight, Weight
from worker.weights.reader import WeightReader


class NormsPlusOne:
    """A WeightReader over one whose norms are stored as what they differ from 1 by."""

    def __init__(self, take: WeightReader) -> None:
        self._take = take

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._take(name)
        return 1.0 + tensor.float() if name.endswith("norm.weight") else tensor

    def float32(self, name: str) -> torch.Tensor:
        return self._take.float32(name)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._take.weight(name, outputs, inputs)

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self._take.head_weight(name, outputs)

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return self._take.kv_scale(attention)

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return self._take.packed(names)

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        self._take.keep(names, packed)
