"""Where tensors come from: checks a checkpoint's tensors, reads them, or makes random ones."""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from kernels.linear.weights import PackedWeight, Weight, map_tensors
from worker.weights.conversion import columns_of, in_pieces, part_of
from worker.weights.quantization import Quantization, head_quantization, quantized, quantized_expert
from worker.weights.reader import Shape, WeightsError, some

_T = TypeVar("_T")
_CPU = torch.device("cpu")
# In the names of a mixture's experts, whatever the family.
_EXPERT = ".experts."
_log = logging.getLogger("octavo.worker")


class TensorSource(Protocol):
    """Tensors of one checkpoint under Hugging Face names, read one by one, so that no second copy of all ever
    exists."""

    # For messages.
    path: Path

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """dtype: None: in whatever float dtype it is stored. rows: of a matrix, those alone. What a file holds as it is
        wanted may be a view of the file. Raises WeightsError if its bytes are damaged."""
        ...

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        """Of a linear layer, as it is stored. Raises WeightsError."""
        ...

    def is_left_out(self, name: str) -> bool:
        """Whether the checkpoint is quantized, but this weight of a linear layer was left in floats."""
        ...

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        """As `WeightReader.kv_scale`."""
        ...


def check_tensors(
    source: TensorSource, expected: Mapping[str, Shape], *, tied: bool, left_out: tuple[str, ...] = ()
) -> None:
    """Raises WeightsError unless the source holds exactly the expected tensors, in their shapes.

    A stored output head is no error where the config ties it to the embeddings (many checkpoints hold both), nor are
    the inverse frequencies that old checkpoints carry, nor tensors whose names begin with one of left_out.
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
        if name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not name.startswith(left_out)
        and not (tied and name == "lm_head.weight")
    ]
    if unexpected:
        raise WeightsError(f"{source.path}: {len(unexpected)} tensors are not of this architecture: {some(unexpected)}")


class SourceReader:
    """A WeightReader over a source. Reports the fraction of all elements given out so far."""

    def __init__(
        self,
        source: TensorSource,
        expected: Mapping[str, Shape],
        dtype: torch.dtype,
        quantization: Quantization,
        progress: Callable[[float], None],
        device: torch.device = _CPU,
    ) -> None:
        """device: of all tensors that it gives."""
        self._source, self._expected = source, expected
        self._dtype, self._device, self._progress = dtype, device, progress
        self._quantization: Quantization = quantization
        self._total = sum(torch.Size(shape).numel() for shape in expected.values())
        self._taken = 0
        self._lacks_kv_scales = False
        self._given = WeakValueDictionary[str, torch.Tensor]()

    def __call__(self, name: str) -> torch.Tensor:
        self._given[name] = taken = self._floats(name)
        return self._took(name, taken)

    def float32(self, name: str) -> torch.Tensor:
        return self._took(name, self._source.tensor(name).to(self._device, torch.float32))

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._took(name, self._weight(name, self._quantization, outputs, inputs))

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        quantization = head_quantization(self._quantization)
        # A head that is tied to the embeddings is the same memory: a gigabyte, of some models.
        given = self._given.get(name) if quantization == "none" else None
        if given is None:
            return self._took(name, self._weight(name, quantization, outputs, None))
        return self._took(name, given if outputs is None else given[outputs])

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        scales = self._source.kv_scale(attention)
        if scales is None and not self._lacks_kv_scales:
            self._lacks_kv_scales = True
            _log.warning(
                "%s has no k_scale and v_scale for %s: its KV goes into e4m3 as it is, where numbers beyond 448 are "
                "cut off; kv_cache_dtype=auto keeps them", self._source.path, attention,
            )  # fmt: skip
        return scales

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return None

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """A checkpoint has no place for it."""

    def count(self, name: str) -> None:
        """As taken: whoever asks has it from elsewhere."""
        self._took(name, None)

    def _weight(self, name: str, quantization: Quantization, outputs: slice | None, inputs: slice | None) -> Weight:
        # What the maker of an FP8 checkpoint left in floats loses too much in so few bits.
        if quantization == "none" or (quantization == "fp8" and self._source.is_left_out(name)):
            floats_OI = self._floats(name, outputs)
            return floats_OI if inputs is None else columns_of(floats_OI, inputs)
        # On a GPU weights are quantized there: a core takes seconds for a billion of them.
        if self._device != _CPU or quantization == "fp8":
            stored = map_tensors(self._source.weight(name), lambda tensor: tensor.to(self._device))
            if quantization == "fp8" and _EXPERT in name:
                return part_of(quantized_expert(stored), outputs, inputs)
            return part_of(quantized(stored, quantization), outputs, inputs)
        num_outputs, num_inputs = self._expected[name]
        rows = outputs or slice(0, num_outputs)

        def read(piece: slice) -> Weight:
            return quantized(self._source.weight(name, piece), quantization)

        made = in_pieces(read, rows, num_inputs, inputs)
        if made is None:
            # Numbers that are too large for some kind are in some pieces alone.
            made = part_of(quantized(self._source.weight(name), quantization), outputs, inputs)
        return made

    def _floats(self, name: str, rows: slice | None = None) -> torch.Tensor:
        if self._device != _CPU:
            return self._source.tensor(name, None, rows).to(self._device, self._dtype)
        return self._source.tensor(name, self._dtype, rows)

    def _took(self, name: str, taken: _T) -> _T:
        self._taken += torch.Size(self._expected[name]).numel()
        self._progress(min(1.0, self._taken / self._total))
        return taken


class DummySource:
    """A TensorSource whose tensors depend on nothing but their names and shapes."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape]) -> None:
        self.path = path
        self.shapes = shapes

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        values = self._values(name).to(dtype or torch.float32)
        return values if rows is None else values[rows].clone()

    def _values(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator).mul_(0.02)

    def weight(self, name: str, rows: slice | None = None) -> torch.Tensor:
        return self.tensor(name, None, rows)

    def is_left_out(self, name: str) -> bool:
        return False

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return None
