"""Sources of tensors: checks a checkpoint's tensors, reads them, or makes random ones."""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from kernels.linear.weights import PackedWeight, Weight, map_tensors
from worker.weights.conversion import columns_of, in_pieces, part_of
from worker.weights.quantization.kinds import Quantization, head_quantization, quantized, quantized_expert
from worker.weights.reader import Shape, WeightsError, some

_T = TypeVar("_T")
_CPU = torch.device("cpu")
# Part of the names of a mixture's experts, in all families.
_EXPERT = ".experts."
_log = logging.getLogger("octavo.worker")


class TensorSource(Protocol):
    """The tensors of one checkpoint, under Hugging Face names. They are read one by one, so that there is never a
    second full copy."""

    # For messages.
    path: Path

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """Returns a tensor, which may be a view of the file if no conversion is needed. dtype: None: the float dtype in
        which it is stored. rows: only these rows of a matrix. Raises WeightsError if its bytes are damaged."""
        ...

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        """Returns a linear layer's weight, as it is stored. Raises WeightsError."""
        ...

    def is_left_out(self, name: str) -> bool:
        """Returns True if the checkpoint is quantized but leaves this linear layer's weight in floats."""
        ...

    def is_packed_for(self, quantization: Quantization) -> bool:
        """Returns True if the checkpoint packs weights for this quantization: layers are taken as they are stored, and
        those that are stored as floats, or that no kernel keeps, are floats."""
        ...

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        """Returns the same as `WeightReader.kv_scale`."""
        ...


def check_tensors(
    source: TensorSource, expected: Mapping[str, Shape], *, tied: bool, left_out: tuple[str, ...] = ()
) -> None:
    """Raises WeightsError unless the source holds exactly the expected tensors, in their shapes.

    These extra tensors are allowed: an output head that the config ties to the embeddings (many checkpoints hold both),
    the inverse frequencies in old checkpoints, and tensors whose names begin with one of left_out.
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
    """A WeightReader over a source. Reports as progress the fraction of all elements that have been read."""

    def __init__(
        self,
        source: TensorSource,
        expected: Mapping[str, Shape],
        dtype: torch.dtype,
        quantization: Quantization,
        progress: Callable[[float], None],
        device: torch.device = _CPU,
    ) -> None:
        """device: where all returned tensors are."""
        self._source, self._expected = source, expected
        self._dtype, self._device, self._progress = dtype, device, progress
        self._quantization: Quantization = quantization
        self._is_packed = source.is_packed_for(quantization)
        self._total = sum(torch.Size(shape).numel() for shape in expected.values())
        self._taken = 0
        self._lacks_kv_scales = self._has_unkept = False
        self._given = WeakValueDictionary[str, torch.Tensor]()

    def __call__(self, name: str) -> torch.Tensor:
        self._given[name] = taken = self._floats(name)
        return self._took(name, taken)

    def float32(self, name: str) -> torch.Tensor:
        return self._took(name, self._source.tensor(name).to(self._device, torch.float32))

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._took(name, self._weight(name, self._quantization, outputs, inputs))

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        quantization = head_quantization(self._quantization, on_gpu=self._device.type != "cpu")
        if self._is_packed:
            quantization = "none" if self._source.is_left_out(name) else self._quantization
        # A head that is tied to the embeddings shares their memory, which saves a gigabyte in some models.
        given = self._given.get(name) if quantization == "none" else None
        if given is None:
            return self._took(name, self._weight(name, quantization, outputs, None))
        return self._took(name, given if outputs is None else given[outputs])

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        scales = self._source.kv_scale(attention)
        if scales is None and not self._lacks_kv_scales:
            self._lacks_kv_scales = True
            _log.warning(
                "%s has no k_scale and v_scale for %s: its KV is stored in e4m3 with scale 1, and numbers beyond 448 "
                "are clipped; kv_cache_dtype=auto avoids this",
                self._source.path,
                attention,
            )
        return scales

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        return None

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        """Does nothing: a checkpoint has no place for packed weights."""

    def count(self, name: str) -> None:
        """Counts a tensor as read; the caller got it from somewhere else."""
        self._took(name, None)

    def _weight(self, name: str, quantization: Quantization, outputs: slice | None, inputs: slice | None) -> Weight:
        # The maker of an FP8 checkpoint left these weights in floats because FP8 would lose too much accuracy.
        leaves_out = quantization == "fp8" or self._is_packed
        if quantization == "none" or (leaves_out and self._source.is_left_out(name)):
            floats_OI = self._floats(name, outputs)
            return floats_OI if inputs is None else columns_of(floats_OI, inputs)
        if self._is_packed:
            return self._as_stored(name, outputs, inputs)
        # A GPU quantizes its weights itself: a CPU core takes seconds for a billion of them.
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
            # Only some pieces hold numbers that are too large for their kind, so convert the weight as a whole.
            made = part_of(quantized(self._source.weight(name), quantization), outputs, inputs)
        return made

    def _as_stored(self, name: str, outputs: slice | None, inputs: slice | None) -> Weight:
        """Returns a weight as it is stored; one that no kernel keeps, in the model's dtype."""
        num_outputs, num_inputs = self._expected[name]
        read = partial(self._source.weight, name)
        made = in_pieces(read, outputs or slice(0, num_outputs), num_inputs, inputs)
        if made is not None and not isinstance(made, torch.Tensor):
            return map_tensors(made, lambda tensor: tensor.to(self._device))
        if not self._has_unkept:
            self._has_unkept = True
            _log.info(
                "%s: no kernel keeps %s as it is stored, so it is dequantized to %s, and so are others like it",
                self._source.path,
                name,
                str(self._dtype).removeprefix("torch."),
            )
        floats_OI = self._floats(name, outputs)
        return floats_OI if inputs is None else columns_of(floats_OI, inputs)

    def _floats(self, name: str, rows: slice | None = None) -> torch.Tensor:
        if self._device != _CPU:
            return self._source.tensor(name, None, rows).to(self._device, self._dtype)
        return self._source.tensor(name, self._dtype, rows)

    def _took(self, name: str, taken: _T) -> _T:
        self._taken += torch.Size(self._expected[name]).numel()
        self._progress(min(1.0, self._taken / self._total))
        return taken


class DummySource:
    """A TensorSource of random tensors that depend only on their names and shapes."""

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

    def is_packed_for(self, quantization: Quantization) -> bool:
        return False

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return None
