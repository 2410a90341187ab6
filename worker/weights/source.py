"""Where tensors come from, and whether they are those that the model needs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from kernels.linear.packed_weight import PackedWeight
from kernels.linear.weights import Weight
from worker.take_tensor import Shape
from worker.weights.errors import WeightsError, some
from worker.weights.quantization import Quantization, head_quantization, quantized

_T = TypeVar("_T")


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

    def weight(self, name: str) -> Weight:
        """Of a linear layer, as it is stored. Raises WeightsError."""
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


class Take:
    """A TakeTensor over a source. Reports the fraction of all elements given out so far."""

    def __init__(
        self,
        source: TensorSource,
        expected: Mapping[str, Shape],
        dtype: torch.dtype,
        quantization: Quantization,
        progress: Callable[[float], None],
    ) -> None:
        self._source, self._expected = source, expected
        self._dtype, self._progress = dtype, progress
        self._quantization: Quantization = quantization
        self._total = sum(torch.Size(shape).numel() for shape in expected.values())
        self._taken = 0

    def __call__(self, name: str) -> torch.Tensor:
        return self._took(name, self._source.tensor(name).to(self._dtype))

    def weight(self, name: str) -> Weight:
        return self._took(name, self._weight(name, self._quantization))

    def head_weight(self, name: str) -> Weight:
        return self._took(name, self._weight(name, head_quantization(self._quantization)))

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return None

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """A checkpoint has no place for it."""

    def count(self, name: str) -> None:
        """As taken: whoever asks has it from elsewhere."""
        self._took(name, None)

    def _weight(self, name: str, quantization: Quantization) -> Weight:
        if quantization == "none":
            return self._source.tensor(name).to(self._dtype)
        return quantized(self._source.weight(name), quantization)

    def _took(self, name: str, taken: _T) -> _T:
        self._taken += torch.Size(self._expected[name]).numel()
        self._progress(min(1.0, self._taken / self._total))
        return taken
