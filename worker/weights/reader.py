"""How layers read their weights, wherever these come from."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.linear.weights import PackedWeight, Weight


class WeightsError(ValueError):
    """A weight file is missing, damaged, or of another model. The message names the file and what is wrong with it."""


def some(names: list[str]) -> str:
    """The first few of `names`, for a message."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


Shape = tuple[int, ...]


class WeightReader(Protocol):
    """Gives tensors by their Hugging Face names, on the device that computes, which the caller may keep."""

    def __call__(self, name: str) -> torch.Tensor:
        """In the model's dtype."""
        ...

    def float32(self, name: str) -> torch.Tensor:
        """In float32 whatever the model's dtype: of few numbers whose last bits decide."""
        ...

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        """Of a linear layer, in the model's quantization. outputs, inputs: a rank's part of them, which alone is read
        as far as can be. Raises ValueError for a part that would cut what shares a scale."""
        ...

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        """Of the output head, which quantization to 4 bits leaves at 8, and FP8 in floats."""
        ...

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        """Of keys and of values, for a KV cache of e4m3: number = scale * stored. None: the checkpoint has none, and 1
        is to be taken; a warning has said so. attention: such as model.layers.3.self_attn. Raises WeightsError for
        scales that are no positive numbers."""
        ...

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        """What `keep` was given for the weights `names`, side by side, by an earlier start; None: they are to be
        packed."""
        ...

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """For the next start, perhaps."""
        ...
