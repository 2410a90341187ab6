"""Reads safetensors files that store layers with the same input as one layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles


class _Part(NamedTuple):
    """The place of a layer's tensor: rows of a stored one; None: all layers in it share the whole tensor."""

    stored: str
    rows: slice | None


class FusedFiles(SafetensorsFiles):
    """Presents each layer's tensors separately, under the llama family's names: rows of the stored ones."""

    # The layers that a stored one consists of: q, k and v; layers of equal size; or one, under another name.
    fused: ClassVar[Mapping[str, tuple[str, ...]]]

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._parts: dict[str, _Part] = {}
        stored_shapes, self.shapes = self.shapes, {}
        for stored, shape in stored_shapes.items():
            layers = self._layers(stored, stored_shapes)
            if layers is None:
                self.shapes[stored] = shape
                continue
            first = 0
            for layer, num_rows in layers.items():
                self._add(layer, stored, shape, slice(first, first + num_rows), sum(layers.values()))
                first += num_rows

    def stored_name(self, name: str) -> str:
        return self._parts[name].stored if name in self._parts else name

    def whole_of(self, name: str) -> tuple[str, ...]:
        for fused, layers in self.fused.items():
            for layer in layers:
                prefix, found, kind = name.partition(layer)
                if found:
                    return f"{prefix}{fused}{kind}", *(f"{prefix}{each}{kind}" for each in layers)
        return ()

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        if name not in self._parts:
            return self._read_rows(name, rows)
        stored, own = self._parts[name]
        if own is not None:
            rows = own if rows is None else slice(own.start + rows.start, own.start + rows.stop)
        return self._read_rows(stored, rows)

    def _layers(self, stored: str, shapes: dict[str, Shape]) -> dict[str, int] | None:
        """Returns the tensors that a stored one consists of, and their numbers of rows; None: it is not fused."""
        for fused, layers in self.fused.items():
            prefix, found, kind = stored.partition(fused)
            weight = shapes.get(f"{prefix}{fused}weight", ())
            output = shapes.get(f"{prefix}.self_attn.o_proj.weight", ())
            is_packed = f"{prefix}{fused}weight.absmax" in shapes
            if not found or len(weight) != 2 or len(output) != 2 or is_packed:
                continue
            # q has as many outputs as attention's output layer has inputs.
            first = output[1] if len(layers) == 3 else weight[0] // len(layers)
            others = (weight[0] - first) // max(1, len(layers) - 1)
            return {f"{prefix}{layer}{kind}": others if i else first for i, layer in enumerate(layers)}
        return None

    def _add(self, name: str, stored: str, shape: Shape, rows: slice, num_rows: int) -> None:
        self.dtypes[name] = self.dtypes[stored]
        if shape in ((), (1,)):
            self._parts[name], self.shapes[name] = _Part(stored, None), shape
            return
        if shape[0] != num_rows:
            raise WeightsError(
                f"{self.path}: {stored} has {shape[0]} rows: it must have 1, or {num_rows}, one for each output of the "
                "layer"
            )
        self._parts[name], self.shapes[name] = _Part(stored, rows), (rows.stop - rows.start, *shape[1:])


class Phi3Files(FusedFiles):
    """Reads the files of Phi-3 and GLM-4: q, k and v are one layer, gate and up another."""

    fused: ClassVar = {
        ".self_attn.qkv_proj.": (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
        ".mlp.gate_up_proj.": (".mlp.gate_proj.", ".mlp.up_proj."),
    }
