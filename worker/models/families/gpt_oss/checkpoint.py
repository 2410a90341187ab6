"""Reads gpt-oss's files, which store all experts of a layer in one tensor: in floats, or in MXFP4.

Legend: N experts, H hidden size, I intermediate size, G blocks of 32 inputs.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

# In floats [N, H, 2I] and [N, I, H]; in MXFP4 _blocks [N, outputs, G, 16] and _scales [N, outputs, G]. Biases: [N, 2I]
# and [N, H]. Of gate_up_proj's outputs, even ones are the gate's, odd ones up's.
_EXPERTS = ".experts."
_FUSED, _DOWN = "gate_up_proj", "down_proj"
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_DIMS = {"": 3, _BLOCKS: 4, _SCALES: 3, _BIAS: 2}
_BLOCK_BYTES = 16


class _Part(NamedTuple):
    """The place of an expert's tensor in a stored one."""

    stored: str
    expert: int
    # Rows of the layer among the stored outputs.
    outputs: slice
    kind: str  # "", _BLOCKS, _SCALES or _BIAS


class GptOssFiles(SafetensorsFiles):
    """Presents each expert's weights and biases separately, as linear layers read them; in MXFP4, its blocks and its
    scales. Only the rows that are read are ever in memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._parts: dict[str, _Part] = {}
        stored_shapes, dtypes = self.shapes, self.dtypes
        self.shapes, self.dtypes = {}, {}
        for stored, shape in stored_shapes.items():
            layer, found, name = stored.partition(_EXPERTS)
            projection = next((each for each in (_FUSED, _DOWN) if found and name.startswith(each)), None)
            if projection is None:
                self.shapes[stored], self.dtypes[stored] = shape, dtypes[stored]
                continue
            kind = name.removeprefix(projection)
            if len(shape) != _DIMS.get(kind):
                raise WeightsError(f"{self.path}: {stored} of shape {list(shape)} is no tensor of gpt-oss's experts")
            self._add(f"{layer}{_EXPERTS}", projection, _Part(stored, 0, slice(0), kind), shape, dtypes[stored])
            if kind == _BLOCKS:
                self._check_scales(stored, shape, stored_shapes, dtypes)

    def stored_name(self, name: str) -> str:
        return self._parts[name].stored if name in self._parts else name

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._read_rows(name, rows)
        outputs, expert = part.outputs, part.expert
        if rows is not None:
            step = outputs.step
            outputs = slice(
                outputs.start + rows.start * step, min(outputs.start + rows.stop * step, outputs.stop), step
            )
        # A safetensors slice has no step: the numbers between are read, too.
        span, every = slice(outputs.start, outputs.stop), slice(None, None, outputs.step)
        if part.kind:
            return self._read(part.stored, lambda file, stored: file.get_slice(stored)[expert, span])[every].clone()
        inputs_first = self._read(part.stored, lambda file, stored: file.get_slice(stored)[expert, :, span])
        return inputs_first[:, every].t().contiguous()

    def _add(self, prefix: str, projection: str, part: _Part, shape: Shape, dtype: str) -> None:
        """Adds the tensors of all experts that a stored tensor holds."""
        # A weight in floats has its inputs first.
        outputs, others = (shape[1], shape[2:]) if part.kind else (shape[2], shape[1:2])
        layers = {_DOWN: slice(0, outputs, 1)}
        if projection == _FUSED:
            layers = {"gate_proj": slice(0, outputs, 2), "up_proj": slice(1, outputs, 2)}
        for expert in range(shape[0]):
            for layer, places in layers.items():
                name = f"{prefix}{expert}.{layer}.{part.kind.removeprefix('_') or 'weight'}"
                self._parts[name] = part._replace(expert=expert, outputs=places)
                self.shapes[name] = (len(range(*places.indices(outputs))), *others)
                self.dtypes[name] = dtype

    def _check_scales(self, blocks: str, shape: Shape, shapes: dict[str, Shape], dtypes: dict[str, str]) -> None:
        scales = blocks.removesuffix(_BLOCKS) + _SCALES
        if shapes.get(scales) != shape[:-1] or (dtypes[blocks], dtypes[scales]) != ("U8", "U8"):
            found = f"{dtypes[scales]} {list(shapes[scales])}" if scales in shapes else "missing"
            raise WeightsError(
                f"{self.path}: {scales} is {found}; U8 {list(shape[:-1])} is expected beside {blocks}, U8 {list(shape)}"
            )
        if shape[-1] != _BLOCK_BYTES:
            raise WeightsError(
                f"{self.path}: {blocks} of shape {list(shape)}: blocks of {_BLOCK_BYTES} bytes are expected"
            )
