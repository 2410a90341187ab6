"""MXFP4 (OCP Microscaling Formats, version 1.0): e2m1 numbers in blocks of 32 that share a power of two.

gpt-oss's files hold blocks uint8 [..., I / 32, 16] and scales uint8 [..., I / 32], of all experts together; a family's
files present them for each layer (layer.blocks, layer.scales). compressed-tensors' hold weight_packed uint8 [O, I / 2]
and weight_scale uint8 [O, I / 32]. A byte's low half is the first of two numbers. A scale is an exponent with 127
added; 255 stands for NaN.

Legend: O outputs, I inputs, G blocks of 32 inputs.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import torch

from kernels.linear.weights import GROUP, Int8Weight
from worker.weights.quantization.groups import check_stored
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import StoredQuantization, beside
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

# Twice the numbers, which are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and negative.
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BIAS, _NAN = 127, 255


class Mxfp4(msgspec.Struct, kw_only=True):
    """quantization_config of gpt-oss."""

    modules_to_not_convert: list[str] | None = None

    def stored(self) -> StoredQuantization:
        return StoredQuantization(
            schemes=((("Linear",), MXFP4_BLOCKS),),
            ignored=tuple(self.modules_to_not_convert or ()),
            description="mxfp4",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Scheme:
    """names: of the tensors with numbers and with scales, beside layer.weight."""

    names: tuple[str, str]
    # Numbers are [O, G, 16], not [O, I / 2].
    has_blocks: bool
    # Layers that the files hold as floats are floats; else each must be in this layout.
    may_be_floats: bool

    @property
    def made_for(self) -> Quantization:
        # Integers of 8 bits express the numbers, but take twice the memory, and round inputs.
        return "none"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return not self.may_be_floats or beside(name, self.names[0]) in files.shapes or name not in files.shapes

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        return [tensor for each in self.names if (tensor := beside(name, each)) not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "Mxfp4Layer":
        numbers, scales = (beside(name, each) for each in self.names)
        shape = files.shapes[scales]
        num_outputs, num_blocks = shape if len(shape) == 2 else (0, 0)
        check_stored(files, scales, ("U8",), (num_outputs, num_blocks), "of outputs x blocks")
        half = GROUP // 2
        stored = (num_outputs, num_blocks, half) if self.has_blocks else (num_outputs, num_blocks * half)
        check_stored(files, numbers, ("U8",), stored, f"beside {scales} of shape {list(shape)}")
        return Mxfp4Layer(files, numbers, scales, (num_outputs, num_blocks * GROUP))


MXFP4_BLOCKS = Mxfp4Scheme(names=("blocks", "scales"), has_blocks=True, may_be_floats=True)
MXFP4_PACKED = Mxfp4Scheme(names=("weight_packed", "weight_scale"), has_blocks=False, may_be_floats=False)


class Mxfp4Layer:
    """A StoredLayer in MXFP4."""

    def __init__(self, files: SafetensorsFiles, numbers: str, scales: str, shape: tuple[int, int]) -> None:
        self.shape: Shape = shape
        self.tensors: Collection[str] = [numbers, scales]
        self._files, self._numbers, self._scales = files, numbers, scales

    def floats(self, rows: slice) -> torch.Tensor:
        codes_OI, exponents_OG = self._read(rows)
        scales_OG = _powers(exponents_OG)
        return _NUMBERS[codes_OI.long()].unflatten(1, (-1, GROUP)).mul_(scales_OG.unsqueeze(2)).flatten(1)

    def weight(self, rows: slice | None) -> Int8Weight | None:
        """8 bits express the numbers, if float16 expresses half of each scale."""
        codes_OI, exponents_OG = self._read(rows or slice(0, self.shape[0]))
        if exponents_OG.min() - 1 < -24 or exponents_OG.max() - 1 > 15:
            return None
        scales_OG = _powers(exponents_OG - 1).half()
        return Int8Weight(values_OI=_DOUBLED[codes_OI.long()], scales_OG=scales_OG)

    def _read(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes, uint8 [rows, I], and exponents, int32 [rows, G]."""
        stored_OG = self._files.read(self._scales, rows)
        if (stored_OG == _NAN).any():
            name = self._files.stored_name(self._scales)
            raise WeightsError(f"{self._files.path}: {name} holds {_NAN}, which is NaN; scales must be finite")
        packed = self._files.read(self._numbers, rows).flatten(1)
        codes_OI = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
        return codes_OI, stored_OG.int() - _BIAS


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Returns powers of two, exactly, in float32."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
