"""Reads safetensors files of models with a vision tower, under names that layers expect."""

from math import prod
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from worker.weights.reader import Shape
from worker.weights.safetensors_files import SafetensorsFiles


class _Stored(NamedTuple):
    name: str
    # The tensor's rows in the stored one; None: all.
    rows: slice | None = None


class VisionFiles(SafetensorsFiles):
    """Presents tensors under other prefixes, parts of stored ones separately, and convolutions of patches as the
    matrices that they are."""

    # The prefix of stored tensors, and the one that it is presented as; the first that fits counts.
    prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()
    # Parts of names of tensors that hold several layers' outputs, of equal size, and what stands there for each layer.
    split: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    # Presented names of weights of convolutions.
    flattened: ClassVar[tuple[str, ...]] = ()

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._stored: dict[str, _Stored] = {}
        shapes, dtypes = self.shapes, self.dtypes
        self.shapes, self.dtypes = {}, {}
        for stored, shape in shapes.items():
            for name, rows in self._presented(self._renamed(stored), shape):
                self._stored[name] = _Stored(stored, rows)
                self.dtypes[name] = dtypes[stored]
                self.shapes[name] = shape if rows is None else (rows.stop - rows.start, *shape[1:])
                if name in self.flattened:
                    self.shapes[name] = (shape[0], prod(shape[1:]))

    def stored_name(self, name: str) -> str:
        found = self._stored.get(name)
        if found is not None:
            return found.name
        # Packed weights have other tensors in their place.
        for stored, presented in self.prefixes:
            if name.startswith(presented) and any(each.name.startswith(stored) for each in self._stored.values()):
                return f"{stored}{name.removeprefix(presented)}"
        return name

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        stored, own = self._stored[name]
        if own is not None:
            rows = own if rows is None else slice(own.start + rows.start, own.start + rows.stop)
        values = self._read_rows(stored, rows)
        return values.flatten(1) if name in self.flattened else values

    def _renamed(self, stored: str) -> str:
        for prefix, presented in self.prefixes:
            if stored.startswith(prefix):
                return f"{presented}{stored.removeprefix(prefix)}"
        return stored

    def _presented(self, name: str, shape: Shape) -> list[tuple[str, slice | None]]:
        for whole, parts in self.split:
            before, found, after = name.partition(whole)
            if found and shape and shape[0] % len(parts) == 0:
                size = shape[0] // len(parts)
                return [(f"{before}{part}{after}", slice(i * size, (i + 1) * size)) for i, part in enumerate(parts)]
        return [(name, None)]
