"""Reads Llama 4's files, which may also hold a vision model, and may store all experts in one tensor.

Legend: N experts, H hidden size, I intermediate size.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from worker.weights.safetensors_files import SafetensorsFiles

# The prefix of the text model's tensors in files that also hold a vision model.
_TEXT = "language_model."
# [N, H, 2I], the gate's columns first, and [N, I, H].
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class _Expert(NamedTuple):
    """The place of an expert's weight: columns of its matrix in a stored tensor, whose rows are inputs."""

    stored: str
    number: int
    columns: slice


class Llama4Files(SafetensorsFiles):
    """Presents the text model's names without a prefix, and each expert's weights separately, as linear layers read
    them. Only the parts of a tensor that are read are ever in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._stored: dict[str, str] = {}
        self._experts: dict[str, _Expert] = {}
        shapes, dtypes = self.shapes, self.dtypes
        self.shapes, self.dtypes = {}, {}
        self._prefix = _TEXT if any(name.startswith(_TEXT) for name in shapes) else ""
        for stored, shape in shapes.items():
            name = stored.removeprefix(_TEXT)
            if len(shape) == 3 and name.endswith((_GATE_UP, _DOWN)):
                self._add_experts(name, stored, shape, dtypes[stored])
            else:
                self._stored[name] = stored
                self.shapes[name], self.dtypes[name] = shape, dtypes[stored]

    def stored_name(self, name: str) -> str:
        if name in self._experts:
            prefix, _, _ = self._experts[name].stored.partition(".experts.")
            _, _, suffix = name.partition(".experts.")
            return f"{prefix}.experts.{suffix}"
        # Packed weights have other tensors in their place.
        return self._stored.get(name, f"{self._prefix}{name}")

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        expert = self._experts.get(name)
        if expert is None:
            return self._read_rows(self._stored[name], rows)
        columns = expert.columns
        if rows is not None:
            columns = slice(columns.start + rows.start, columns.start + rows.stop)
        columns_first = self._read(
            expert.stored, lambda file, stored: file.get_slice(stored)[expert.number, :, columns]
        )
        return columns_first.t().contiguous()

    def _add_experts(self, name: str, stored: str, shape: tuple[int, ...], dtype: str) -> None:
        prefix, _, kind = name.rpartition(".")
        num_experts, num_inputs, num_columns = shape
        parts = {"down_proj": slice(0, num_columns)}
        if kind == "gate_up_proj":
            half = num_columns // 2
            parts = {"gate_proj": slice(0, half), "up_proj": slice(half, num_columns)}
        for number in range(num_experts):
            for part, columns in parts.items():
                weight = f"{prefix}.{number}.{part}.weight"
                self._experts[weight] = _Expert(stored, number, columns)
                self.shapes[weight] = (columns.stop - columns.start, num_inputs)
                self.dtypes[weight] = dtype
