"""bitsandbytes (bitsandbytes-foundation/bitsandbytes): nf4 and fp4 of QLoRA (arXiv
2305.14314), and LLM.int8 (arXiv 2208.07339).

4 bits: weight holds a byte for two numbers, the first in its high half, in the order of rows; weight.quant_map float32
[16] has the number of each code; weight.absmax has the factor of each block of numbers; weight.quant_state.* is a JSON
text with the shape and the block size. With double quantization absmax is uint8, a code of weight.nested_quant_map
float32 [256] times weight.nested_absmax, plus an offset.

8 bits: weight int8 [O, I], SCB float32 [O], the largest number of each output; weight = SCB / 127 * integer.

Legend: O outputs, I inputs.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import torch

from kernels.linear.weights import Int8Weight
from worker.weights.quantization.groups import check_stored
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, Scheme, StoredQuantization, beside
from worker.weights.quantization.scaled import check_finite
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

_TYPES = ("nf4", "fp4")
_STATE = "quant_state.bitsandbytes__"
_LONGEST_STATE = 2**16
# As the library rounds 1 / 127.
_INT8_FACTOR = 7.874015718698502e-3


class BitsAndBytes(msgspec.Struct, kw_only=True):
    """quantization_config."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    llm_int8_skip_modules: list[str] | None = None

    def stored(self) -> StoredQuantization:
        scheme: Scheme
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError(
                f"load_in_4bit={self.load_in_4bit}, load_in_8bit={self.load_in_8bit}: one of them must be true"
            )
        if self.load_in_8bit:
            scheme, description = Int8Scheme(), "bitsandbytes int8"
        else:
            if self.bnb_4bit_quant_type not in _TYPES:
                raise ValueError(
                    f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not supported; {' and '.join(_TYPES)} are"
                )
            scheme = FourBitScheme(kind=self.bnb_4bit_quant_type)
            nested = ", double quantization" if self.bnb_4bit_use_double_quant else ""
            description = f"bitsandbytes {self.bnb_4bit_quant_type}{nested}"
        return StoredQuantization(
            schemes=((("Linear",), scheme),),
            ignored=("lm_head", *(self.llm_int8_skip_modules or ())),
            description=description,
        )


class _State(msgspec.Struct, kw_only=True):
    """The fields of quant_state."""

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitScheme:
    """kind: nf4 or fp4."""

    kind: str

    @property
    def made_for(self) -> Quantization:
        return "none"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        is_floats = files.dtypes.get(name) in FLOATS and len(files.shapes[name]) == 2 and files.shapes[name][1] > 1
        return f"{name}.absmax" in files.shapes or not is_floats

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        names = [name, f"{name}.absmax", f"{name}.quant_map", self._state_name(name)]
        if files.dtypes.get(f"{name}.absmax") == "U8":
            names += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        return [tensor for tensor in names if tensor not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "FourBitLayer":
        state = self._state(files, name)
        if state.blocksize < 1 or min(state.shape) < 1:
            raise WeightsError(
                f"{files.path}: {self._state_name(name)}: blocksize={state.blocksize} and shape={list(state.shape)} "
                "must be positive"
            )
        num_numbers = state.shape[0] * state.shape[1]
        stored_bytes = files.read(name).nbytes
        if stored_bytes != -(-num_numbers // 2):
            raise WeightsError(
                f"{files.path}: {name} has {stored_bytes} bytes; {-(-num_numbers // 2)} are expected for shape "
                f"{list(state.shape)} in 4 bits"
            )
        num_blocks = -(-num_numbers // state.blocksize)
        why = f"for shape {list(state.shape)} in blocks of {state.blocksize}"
        check_stored(files, f"{name}.absmax", ("F32", "U8"), (num_blocks,), why)
        check_stored(files, f"{name}.quant_map", ("F32",), (16,), "for 4 bits")
        if files.dtypes[f"{name}.absmax"] == "U8":
            if state.nested_blocksize is None or state.nested_blocksize < 1 or state.nested_offset is None:
                raise WeightsError(
                    f"{files.path}: {self._state_name(name)} lacks nested_blocksize or nested_offset, beside absmax of "
                    "U8"
                )
            nested = -(-num_blocks // state.nested_blocksize)
            check_stored(files, f"{name}.nested_absmax", ("F32",), (nested,), why)
            check_stored(files, f"{name}.nested_quant_map", ("F32",), (256,), "for 8 bits")
        return FourBitLayer(files, name, self._state_name(name), state)

    def _state_name(self, name: str) -> str:
        return f"{name}.{_STATE}{self.kind}"

    def _state(self, files: SafetensorsFiles, name: str) -> _State:
        stored = files.read(self._state_name(name))
        try:
            if stored.dtype is not torch.uint8 or stored.numel() > _LONGEST_STATE:
                raise ValueError(f"{stored.numel()} numbers of {stored.dtype}")
            return msgspec.json.decode(bytes(stored.tolist()), type=_State)
        except ValueError as error:
            raise WeightsError(f"{files.path}: {self._state_name(name)} is damaged: {error}") from None


class FourBitLayer:
    """A StoredLayer in nf4 or fp4, which no kernel multiplies."""

    def __init__(self, files: SafetensorsFiles, name: str, state_name: str, state: _State) -> None:
        kinds = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        self.shape: Shape = state.shape
        self.tensors: Collection[str] = [name, state_name, *(f"{name}.{kind}" for kind in kinds)]
        self._files, self._name, self._state = files, name, state

    def floats(self, rows: slice) -> torch.Tensor:
        num_inputs, block = self.shape[1], self._state.blocksize
        first, last = rows.start * num_inputs, rows.stop * num_inputs
        stored = self._files.read(self._name).flatten().view(torch.uint8)[first // 2 : -(-last // 2)]
        codes = torch.stack((stored >> 4, stored & 15), dim=1).flatten()
        codes = codes[first % 2 : first % 2 + last - first].long()
        factors_B = self._factors(slice(first // block, -(-last // block)))
        factors = factors_B[torch.arange(first, last) // block - first // block]
        return (self._numbers("quant_map")[codes] * factors).view(-1, num_inputs)

    def weight(self, rows: slice | None) -> None:
        return None

    def _factors(self, blocks: slice) -> torch.Tensor:
        """Returns the factors of some blocks, in float32."""
        factors_B = self._numbers("absmax", blocks)
        if factors_B.dtype is not torch.uint8:
            return factors_B
        size, offset = self._state.nested_blocksize, self._state.nested_offset
        assert size is not None
        assert offset is not None
        outer_B = self._numbers("nested_absmax")[torch.arange(blocks.start, blocks.stop) // size]
        return self._numbers("nested_quant_map")[factors_B.long()] * outer_B + offset

    def _numbers(self, kind: str, part: slice | None = None) -> torch.Tensor:
        name = f"{self._name}.{kind}"
        stored = self._files.read(name, part)
        check_finite(self._files, name, stored)
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Scheme:
    @property
    def made_for(self) -> Quantization:
        return "int8"

    @property
    def is_packed(self) -> bool:
        return True

    def holds(self, files: SafetensorsFiles, name: str) -> bool:
        return files.dtypes.get(name) not in FLOATS

    def missing(self, files: SafetensorsFiles, name: str) -> list[str]:
        return [tensor for tensor in (name, beside(name, "SCB")) if tensor not in files.shapes]

    def open(self, files: SafetensorsFiles, name: str) -> "Int8Layer":
        shape = files.shapes[name]
        check_stored(files, name, ("I8",), shape[:2], "of outputs x inputs")
        check_stored(files, beside(name, "SCB"), ("F32",), shape[:1], f"for {name} of shape {list(shape)}")
        return Int8Layer(files, name)


class Int8Layer:
    """A StoredLayer of LLM.int8. Inputs get scales for each 32, where LLM.int8 computes large ones in floats."""

    def __init__(self, files: SafetensorsFiles, name: str) -> None:
        self.shape = files.shapes[name]
        self.tensors: Collection[str] = [beside(name, "SCB"), beside(name, "weight_format")]
        self._files, self._name = files, name

    def floats(self, rows: slice) -> torch.Tensor:
        return self._files.read(self._name, rows) * self._largest_O1(rows) * _INT8_FACTOR

    def weight(self, rows: slice | None) -> Int8Weight:
        values_OI = self._files.read(self._name, rows)
        scales_O1 = self._largest_O1(rows or slice(0, self.shape[0])) * _INT8_FACTOR
        return Int8Weight(values_OI=values_OI, scales_OG=scales_O1)

    def _largest_O1(self, rows: slice) -> torch.Tensor:
        name = beside(self._name, "SCB")
        largest_O = self._files.read(name, rows)
        check_finite(self._files, name, largest_O)
        return largest_O.unsqueeze(1)
