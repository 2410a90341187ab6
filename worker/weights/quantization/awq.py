"""AWQ (arXiv 2306.00978), as AutoAWQ's gemm version stores it (casper-hansen/AutoAWQ, WQLinear_GEMM):
qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales float16 [G, O]; weight = scale * (integer - zero).

Legend: O outputs, I inputs, G groups of inputs.
"""

from dataclasses import dataclass

import msgspec
import torch

from worker.weights.quantization.groups import GroupedLayer, check_integers, check_stored, described, unpacked, words
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, StoredQuantization, beside
from worker.weights.safetensors_files import SafetensorsFiles

_BITS = 4
# A word holds outputs 0, 2, 4, 6, 1, 3, 5, 7, the first in its lowest bits; so output 1 is in place 4.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_NAMES = ("qweight", "qzeros", "scales")


class Awq(msgspec.Struct, kw_only=True):
    """quantization_config; llm-awq and old files have other names for two fields."""

    bits: int | None = None
    w_bit: int = _BITS
    group_size: int | None = None
    q_group_size: int = 128
    zero_point: bool = True
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None

    def stored(self) -> StoredQuantization:
        bits = self.w_bit if self.bits is None else self.bits
        group_size = self.q_group_size if self.group_size is None else self.group_size
        version = (self.version or self.format or "gemm").lower()
        if bits != _BITS:
            raise ValueError(f"{bits} bits are not supported; {_BITS} are")
        if version != "gemm":
            raise ValueError(f"version={version!r} is not supported; gemm is")
        if not self.zero_point:
            raise ValueError("zero_point=false is not supported; the gemm version always has zero points")
        check_integers(bits, group_size)
        return StoredQuantization(
            schemes=((("Linear",), AwqScheme(group_size=group_size)),),
            ignored=("lm_head", *(self.modules_to_not_convert or ())),
            description=described("awq", bits, group_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqScheme:
    group_size: int

    @property
    def made_for(self) -> Quantization:
        return "int4"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return beside(name, "qweight") in files.shapes or name not in files.shapes

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        return [tensor for each in _NAMES if (tensor := beside(name, each)) not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "AwqLayer":
        weight, zeros, scales = (beside(name, each) for each in _NAMES)
        shape = files.shapes[weight]
        num_inputs, num_words = shape if len(shape) == 2 else (0, 0)
        check_stored(files, weight, ("I32",), (num_inputs, num_words), "of inputs x words")
        num_groups = 1 if self.group_size == -1 else -(-num_inputs // self.group_size)
        why = f"beside {weight} of shape {list(shape)}, because config.json says group_size={self.group_size}"
        check_stored(files, zeros, ("I32",), (num_groups, num_words), why)
        check_stored(files, scales, FLOATS, (num_groups, num_words * 8), why)
        return AwqLayer(files, name, (num_words * 8, num_inputs), self.group_size)


class AwqLayer(GroupedLayer):
    def __init__(self, files: SafetensorsFiles, name: str, shape: tuple[int, int], group_size: int) -> None:
        tensors = [beside(name, each) for each in _NAMES]
        self._weight, self._zeros, scales = tensors
        super().__init__(files, shape, tensors, scales, _BITS, group_size)

    def _values_OI(self, rows: slice) -> torch.Tensor:
        return self._outputs_first(self._weight, rows)

    def _scales_OG(self, rows: slice) -> torch.Tensor:
        return self._files.read_columns(self._scales, rows).t()

    def _zeros_OG(self, rows: slice) -> torch.Tensor:
        return self._outputs_first(self._zeros, rows).to(torch.int16)

    def _outputs_first(self, name: str, rows: slice) -> torch.Tensor:
        columns, own = words(rows, _BITS)
        return unpacked(self._files.read_columns(name, columns), _BITS, 1, _PLACES)[:, own].t().contiguous()
