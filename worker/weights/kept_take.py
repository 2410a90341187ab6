"""A TakeTensor that knows the packed weights of an earlier start, or notes this start's to be kept."""

import json
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch

from kernels.linear.packed_weight import PackedWeight
from kernels.linear.weights import Weight
from worker.weights.source import Take
from worker.weights.weight_file import WeightFile

# Bytes up to which a tensor is kept though the model has made something else of it.
_SMALL = 2**20


class KeptTake:
    """With a file, what is in it comes from there, and the rest from the checkpoint. Without one, all comes from the
    checkpoint, and `tensors` and `notes` become what a file should hold."""

    def __init__(self, take: Take, file: WeightFile | None, empty: Callable[[int], torch.Tensor]) -> None:
        """empty: gives uint8 memory for weights, of so many bytes."""
        self._take, self._file, self._empty = take, file, empty
        self._packed: dict[str, torch.Tensor] = {}
        self._small: dict[str, torch.Tensor] = {}
        self._held = WeakValueDictionary[str, torch.Tensor]()
        self.notes: dict[str, str] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Packed weights, and other tensors that the model holds as they are; small ones in any case. Of the rest, as
        embeddings of which a rank has a part, a copy would stay for nothing."""
        return {**self._held, **self._small, **self._packed}

    def __call__(self, name: str) -> torch.Tensor:
        if self._file is not None and name in self._file:
            self._take.count(name)
            return self._file.tensor(name, self._empty)
        tensor = self._take(name).contiguous()
        self._held[name] = tensor
        if tensor.nbytes <= _SMALL:
            self._small[name] = tensor
        return tensor

    def float32(self, name: str) -> torch.Tensor:
        return self._take.float32(name)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> Weight:
        return self._take.weight(name, outputs, inputs)

    def head_weight(self, name: str, outputs: slice | None = None) -> Weight:
        return self._take.head_weight(name, outputs)

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return self._take.kv_scale(attention)

    def packed(self, names: Sequence[str]) -> PackedWeight | None:
        key = _key(names)
        if self._file is None or key not in self._file:
            return None
        for name in names:
            self._take.count(name)
        # The note is under the checksum that `tensor` verifies.
        panels = self._file.tensor(key, self._empty)
        return PackedWeight(**json.loads(self._file.note(key)), panels=panels)

    def keep(self, names: Sequence[str], packed: PackedWeight) -> None:
        key = _key(names)
        self._packed[key] = packed.panels
        self.notes[key] = json.dumps(
            {"kind": packed.kind, "num_rows": packed.num_rows, "num_inputs": packed.num_inputs}
        )


def _key(names: Sequence[str]) -> str:
    """Not the name of any tensor: tied embeddings are kept both as they are and packed."""
    return "packed:" + "+".join(names)
