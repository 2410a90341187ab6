"""Where tensors come from, and whether they are those that the model needs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from worker.take_tensor import Shape, TakeTensor
from worker.weights.errors import WeightsError, some


class TensorSource(Protocol):
    """Tensors of one checkpoint under Hugging Face names, read one by one, so that no second copy of all ever
    exists."""

    # For messages.
    path: Path

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def tensor(self, name: str) -> torch.Tensor:
        """In whatever float dtype it is stored. Raises WeightsError if its bytes are damaged."""
        ...


def check_tensors(source: TensorSource, expected: Mapping[str, Shape], *, tied: bool) -> None:
    """Raises WeightsError unless the source holds exactly the expected tensors, in their shapes.

    A stored output head is no error where the config ties it to the embeddings (many checkpoints hold both), nor are
    the inverse frequencies that old checkpoints carry.
    """
    found = source.shapes
    missing = [name for name in expected if name not in found]
    if missing:
        raise WeightsError(f"{source.path}: lacks {len(missing)} of {len(expected)} tensors: {some(missing)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise WeightsError(
                f"{source.path}: {name} has shape {list(found[name])}; the config asks for {list(shape)}"
            )
    unexpected = [
        name
        for name in found
        if name not in expected and not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    ]
    if unexpected:
        raise WeightsError(f"{source.path}: {len(unexpected)} tensors are not of this architecture: {some(unexpected)}")


def take_from(
    source: TensorSource, expected: Mapping[str, Shape], dtype: torch.dtype, progress: Callable[[float], None]
) -> TakeTensor:
    """A TakeTensor that reports the fraction of all elements given out so far."""
    total = sum(torch.Size(shape).numel() for shape in expected.values())
    taken = 0

    def take(name: str) -> torch.Tensor:
        nonlocal taken
        tensor = source.tensor(name).to(dtype)
        taken += tensor.numel()
        progress(min(1.0, taken / total))
        return tensor

    return take
