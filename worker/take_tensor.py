"""How layers get their weights, wherever those come from."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.linear.packed_weight import PackedWeight
from kernels.linear.weights import Weight

Shape = tuple[int, ...]


class TakeTensor(Protocol):
    """Gives tensors by their Hugging Face names, which the caller may keep."""

    def __call__(self, name: str) -> torch.Tensor:
        """In the model's dtype."""
        ...

    def weight(self, name: str) -> Weight:
        """Of a linear layer, in the model's quantization."""
        ...

    def head_weight(self, name: str) -> Weight:
        """Of the output head, which quantization to 4 bits leaves at 8."""
        ...

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        """What `keep` was given for the weights `names`, side by side, by an earlier start; None: they are to be
        packed."""
        ...

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """For the next start, perhaps."""
        ...
