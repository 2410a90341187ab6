"""Integers as compressed-tensors packs them (vllm-project/compressed-tensors, compressors/pack_quantized):
weight_packed int32 [O, I * bits / 32], weight_scale [O, G], weight_shape [2]; for asymmetric weights weight_zero_point
int32 [O * bits / 32, G], for activation ordering weight_g_idx int32 [I]; weight = scale * (integer - zero).

Integers and zero points are stored with 2^(bits - 1) added; without a zero point it is that number.

Legend: O outputs, I inputs, G groups of inputs.
"""

from dataclasses import dataclass

import torch

from worker.weights.quantization.groups import GroupedLayer, check_stored, groups_of_inputs, unpacked, words
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, beside
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

_WEIGHT, _SCALES, _SHAPE = "weight_packed", "weight_scale", "weight_shape"
_ZEROS, _GROUPS = "weight_zero_point", "weight_g_idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantizedScheme:
    """group_size: -1: a scale for each output. has_order: config.json says that inputs are grouped by activations."""

    bits: int
    group_size: int
    symmetric: bool
    has_order: bool

    @property
    def made_for(self) -> Quantization:
        if self.has_order:
            return "none"
        return "int4" if self.bits == 4 else "int8"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return True

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        names = [_WEIGHT, _SCALES, _SHAPE]
        if not self.symmetric:
            names.append(_ZEROS)
        if self.has_order:
            names.append(_GROUPS)
        return [tensor for each in names if (tensor := beside(name, each)) not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "PackQuantizedLayer":
        shape = self._shape(files, beside(name, _SHAPE))
        num_outputs, num_inputs = shape
        why = f"for a weight of shape {list(shape)} in {self.bits} bits, groups of {self.group_size}"
        check_stored(files, beside(name, _WEIGHT), ("I32",), (num_outputs, -(-num_inputs * self.bits // 32)), why)
        num_groups = 1 if self.group_size == -1 else -(-num_inputs // self.group_size)
        check_stored(files, beside(name, _SCALES), FLOATS, (num_outputs, num_groups), why)
        if not self.symmetric:
            num_words = -(-num_outputs * self.bits // 32)
            check_stored(files, beside(name, _ZEROS), ("I32",), (num_words, num_groups), why)
        return PackQuantizedLayer(files, name, shape, self)

    @staticmethod
    def _shape(files: SafetensorsFiles, name: str) -> Shape:
        check_stored(files, name, ("I64", "I32"), (2,), "for outputs and inputs")
        num_outputs, num_inputs = files.read(name).tolist()
        if min(num_outputs, num_inputs) < 1:
            raise WeightsError(f"{files.path}: {name} holds {[num_outputs, num_inputs]}; both must be at least 1")
        return num_outputs, num_inputs


class PackQuantizedLayer(GroupedLayer):
    def __init__(self, files: SafetensorsFiles, name: str, shape: Shape, scheme: PackQuantizedScheme) -> None:
        names = (_WEIGHT, _SCALES, _SHAPE, _ZEROS, _GROUPS)
        tensors = [tensor for each in names if (tensor := beside(name, each)) in files.shapes]
        self._weight, self._zeros, groups = (beside(name, each) for each in (_WEIGHT, _ZEROS, _GROUPS))
        groups_I = None
        if groups in files.shapes:
            groups_I = groups_of_inputs(files, groups, scheme.group_size, shape[1])
        super().__init__(files, shape, tensors, beside(name, _SCALES), scheme.bits, scheme.group_size, groups_I)
        self._symmetric = scheme.symmetric

    def _values_OI(self, rows: slice) -> torch.Tensor:
        return unpacked(self._files.read(self._weight, rows), self._bits, 1)[:, : self.shape[1]].contiguous()

    def _scales_OG(self, rows: slice) -> torch.Tensor:
        return self._files.read(self._scales, rows)

    def _zeros_OG(self, rows: slice) -> torch.Tensor:
        if self._symmetric:
            return torch.full((rows.stop - rows.start, 1), 2 ** (self._bits - 1), dtype=torch.int16)
        words_of_rows, own = words(rows, self._bits)
        return unpacked(self._files.read(self._zeros, words_of_rows), self._bits, 0)[own].to(torch.int16)
