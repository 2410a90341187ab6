"""Weights of one byte each, e4m3 or int8, with scales of a tensor, of channels or of blocks beside them.

Legend: O outputs, I inputs, Y x X blocks that share a scale.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear.weights import BLOCK, Fp8Weight, Int8Weight, e4m3_floats, scaled_
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, beside, one_of
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

# Outputs and inputs that share a scale in e4m3 as GPUs compute with it: a tensor, a channel, a block; 0: all.
FP8_BLOCKS = ((0, 0), (1, 0), (BLOCK, BLOCK))
# safetensors' names of the two kinds of stored weights.
StoredKind = Literal["F8_E4M3", "I8"]
# A quantized layer may have these, too. They are ignored on purpose: inputs get their own scales at run time (in int8
# one for every 32 of a token's numbers; in e4m3 one per token, or for every 128 of its numbers), which fit at least as
# well as one calibrated scale for all inputs.
_SCALES_OF_INPUTS = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledScheme:
    """weight[o, i] = stored[o, i] * the scale of its block."""

    kind: StoredKind
    # The scales of layer.weight are layer.weight_scale, or the first of these names that the file has.
    scale_names: tuple[str, ...] = ("weight_scale",)
    # Outputs and inputs that share a scale; 0: all.
    block: tuple[int, int]
    # The checkpoint was made for inputs in 8-bit integers.
    has_int8_inputs: bool = False

    @property
    def made_for(self) -> Quantization:
        if self.has_int8_inputs:
            return "int8"
        return "fp8" if self.kind == "F8_E4M3" and self.block in FP8_BLOCKS else "none"

    @property
    def is_packed(self) -> bool:
        return False

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return name in files.shapes

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        scale = self._scale_of(files, name)
        # If the weight has another dtype, `open` says so.
        return [] if scale in files.shapes or files.dtypes[name] != self.kind else [scale]

    def open(self, files: SafetensorsFiles, name: str) -> "ScaledLayer":
        if files.dtypes[name] != self.kind:
            raise WeightsError(
                f"{files.path}: {name} is stored as {files.dtypes[name]}; {self.kind} is expected, because "
                "config.json's quantization_config does not leave this layer out"
            )
        scale = self._scale_of(files, name)
        dtype, shape = files.dtypes[scale], files.shapes[scale]
        if dtype not in FLOATS:
            raise WeightsError(f"{files.path}: {scale} is stored as {dtype}; {one_of(FLOATS)} is expected")
        shapes = self._scale_shapes(files.shapes[name])
        if shape not in shapes:
            raise WeightsError(
                f"{files.path}: {scale} has shape {list(shape)}; {list(shapes[0])} is expected for {name}, of shape "
                f"{list(files.shapes[name])}"
            )
        return ScaledLayer(files, name, scale, self)

    def _scale_of(self, files: SafetensorsFiles, name: str) -> str:
        """Returns the name of the tensor with a weight's scales; if there is none, the name that it should have."""
        scales = [beside(name, scale_name) for scale_name in self.scale_names]
        return next((scale for scale in scales if scale in files.shapes), scales[0])

    def _scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Returns the possible shapes of the scales of a weight of `shape`, the usual one first."""
        if self.block == (0, 0):
            return (1,), ()
        return (tuple(-(-size // (step or size)) for size, step in zip(shape, self.block, strict=True)),)


class ScaledLayer:
    """A StoredLayer of a ScaledScheme."""

    def __init__(self, files: SafetensorsFiles, name: str, scale: str, scheme: ScaledScheme) -> None:
        self.shape = files.shapes[name]
        self.tensors: Collection[str] = [scale, *(beside(name, kind) for kind in _SCALES_OF_INPUTS)]
        self._files, self._name, self._scale, self._scheme = files, name, scale, scheme

    def floats(self, rows: slice) -> torch.Tensor:
        """Blocks that the rows would split are read in full."""
        total, scales_YX = self.shape[0], self._scales_YX()
        height, width = self._scheme.block[0] or total, self._scheme.block[1]
        blocks = slice(rows.start // height, -(-rows.stop // height)) if height < total else slice(0, 1)
        whole = slice(blocks.start * height, min(blocks.stop * height, total)) if height < total else rows
        values = self._files.read(self._name, whole)
        floats = values.float() if self._scheme.kind == "I8" else e4m3_floats(values)
        scaled = scaled_(floats, scales_YX[blocks], (min(height, len(floats)), width))
        return scaled[rows.start - whole.start : rows.stop - whole.start]

    def weight(self, rows: slice | None) -> Int8Weight | Fp8Weight | None:
        if self._scheme.kind == "I8":
            scales_O1 = self._scales_YX().expand(self.shape[0], 1)
            scales_O1 = scales_O1 if rows is None else scales_O1[rows]
            return Int8Weight(values_OI=self._files.read(self._name, rows), scales_OG=scales_O1.contiguous())
        if self._scheme.block in FP8_BLOCKS and rows is None:
            return Fp8Weight(values_OI=self._files.read(self._name), scales=self._scales_YX())
        return None

    def _scales_YX(self) -> torch.Tensor:
        """Returns the scales in float32."""
        scales_YX = self._files.read(self._scale).float()
        check_finite(self._files, self._scale, scales_YX)
        return scales_YX.reshape(1, 1) if self._scheme.block == (0, 0) else scales_YX


def check_finite(files: SafetensorsFiles, name: str, scales: torch.Tensor) -> None:
    """Raises WeightsError, naming the tensor, unless all its scales are finite."""
    if not scales.isfinite().all():
        bad = float(scales[~scales.isfinite()][0])
        raise WeightsError(f"{files.path}: {name} holds {bad}; scales must be finite")
