"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel store it (ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear):
qweight int32 [I * bits / 32, O], qzeros int32 [G, O * bits / 32], scales float16 [G, O], g_idx int32 [I];
weight[o, i] = scale * (integer - zero) of group g_idx[i].

Legend: O outputs, I inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from worker.weights.quantization.groups import (
    GroupedLayer,
    check_integers,
    check_stored,
    described,
    groups_of_inputs,
    unpacked,
    words,
)
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, StoredQuantization, beside
from worker.weights.safetensors_files import SafetensorsFiles

# The files hold zero points less this number, subtracted from each word as a whole: a zero point of 0 borrows from the
# next one in its word (GPTQModel, convert_gptq_v2_to_v1_format).
_FORMATS = {"gptq": 1, "gptq_v2": 0}
_NAMES = ("qweight", "qzeros", "scales")
_GROUPS = "g_idx"


class Gptq(msgspec.Struct, kw_only=True):
    """quantization_config."""

    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    lm_head: bool = False
    pack_dtype: str = "int32"
    # GPTQModel: settings of the layers that a regular expression matches; one that begins with -: leaves them out.
    dynamic: dict[str, dict[str, Any]] | None = None
    modules_to_not_convert: list[str] | None = None

    def stored(self) -> StoredQuantization:
        check_integers(self.bits, self.group_size)
        stored_format = (self.checkpoint_format or self.format or "gptq").lower()
        if stored_format not in _FORMATS:
            raise ValueError(f"checkpoint_format={stored_format!r} is not supported; {' and '.join(_FORMATS)} are")
        if self.pack_dtype != "int32":
            raise ValueError(f"pack_dtype={self.pack_dtype!r} is not supported; int32 is")
        others = {pattern: change for pattern, change in (self.dynamic or {}).items() if not pattern.startswith("-")}
        own = {"bits": self.bits, "group_size": self.group_size}
        for pattern, change in others.items():
            if any(change.get(field, value) != value for field, value in own.items()):
                raise ValueError(f"dynamic: {pattern!r} has other bits or groups, which is not supported; leave it out")
        has_order = self.desc_act and self.group_size != -1
        scheme = GptqScheme(
            bits=self.bits, group_size=self.group_size, has_order=has_order, zero_offset=_FORMATS[stored_format]
        )
        ignored = tuple(self.modules_to_not_convert or ())
        return StoredQuantization(
            schemes=((("Linear",), scheme),),
            ignored=ignored if self.lm_head else ("lm_head", *ignored),
            description=described("gptq", self.bits, self.group_size, ", act-order" if has_order else ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqScheme:
    """has_order: inputs are in groups by their activations (desc_act), which no kernel takes."""

    bits: int
    group_size: int
    has_order: bool
    zero_offset: int

    @property
    def made_for(self) -> Quantization:
        if self.has_order:
            return "none"
        return "int4" if self.bits == 4 else "int8"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return beside(name, "qweight") in files.shapes or name not in files.shapes

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        names = (*_NAMES, _GROUPS) if self.has_order else _NAMES
        return [tensor for each in names if (tensor := beside(name, each)) not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "GptqLayer":
        weight, zeros, scales = (beside(name, each) for each in _NAMES)
        shape = files.shapes[weight]
        num_words, num_outputs = shape if len(shape) == 2 else (0, 0)
        check_stored(files, weight, ("I32",), (num_words, num_outputs), "of words x outputs")
        num_inputs = num_words * 32 // self.bits
        num_groups = 1 if self.group_size == -1 else -(-num_inputs // self.group_size)
        why = (
            f"beside {weight} of shape {list(shape)}, because config.json says bits={self.bits}, "
            f"group_size={self.group_size}"
        )
        check_stored(files, zeros, ("I32",), (num_groups, -(-num_outputs * self.bits // 32)), why)
        check_stored(files, scales, FLOATS, (num_groups, num_outputs), why)
        return GptqLayer(files, name, (num_outputs, num_inputs), self)


class GptqLayer(GroupedLayer):
    def __init__(self, files: SafetensorsFiles, name: str, shape: tuple[int, int], scheme: GptqScheme) -> None:
        self._weight, self._zeros, scales = (beside(name, each) for each in _NAMES)
        tensors, groups, bias = [self._weight, self._zeros, scales], beside(name, _GROUPS), beside(name, "bias")
        groups_I = None
        if groups in files.shapes:
            tensors.append(groups)
            groups_I = groups_of_inputs(files, groups, scheme.group_size, shape[1])
        if bias in files.shapes and not files.read(bias).any():
            # AutoGPTQ gives each layer a bias.
            tensors.append(bias)
        super().__init__(files, shape, tensors, scales, scheme.bits, scheme.group_size, groups_I)
        self._zero_offset = scheme.zero_offset

    def _values_OI(self, rows: slice) -> torch.Tensor:
        return unpacked(self._files.read_columns(self._weight, rows), self._bits, 0).t().contiguous()

    def _scales_OG(self, rows: slice) -> torch.Tensor:
        return self._files.read_columns(self._scales, rows).t()

    def _zeros_OG(self, rows: slice) -> torch.Tensor:
        columns, own = words(rows, self._bits)
        offsets = sum(self._zero_offset << place for place in range(0, 32, self._bits))
        stored = self._files.read_columns(self._zeros, columns).long() + offsets
        return unpacked(stored, self._bits, 1)[:, own].t().to(torch.int16)
