"""Linear layers by the C++ kernels: linear.h and dots/quantized.h beside this file."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from enum import IntEnum

import numpy as np
import torch

from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.linear.weights import Int4Weight, Int8Weight, PackedWeight, Weight, concatenate, dequantize
from kernels.native.library import NativeKernels
from kernels.native.memory import passing_memory
from kernels.sampling import TokenMasks


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels/linear/panels.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("gated", c_int32),
        ("weights", c_int32),
        ("activation", c_int32),
        ("soft_cap", c_float),
    )


class WeightKind(IntEnum):
    """`WeightKind` of panels.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    GROUPED_INT8 = 3
    INT4 = 4
    INT4_ZEROS = 5
    SHORT_BFLOAT16 = 6


class Epilogue(IntEnum):
    """`Epilogue` of outputs.h."""

    STORE = 0
    ADD = 1
    STORE_FOR_NEXT = 2
    ADD_FROM_LAST = 3


# Kinds whose linears read the same form of rounded inputs.
_HALVES = {WeightKind.BFLOAT16, WeightKind.SHORT_BFLOAT16}

# `Activation` of panels.h.
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}


# Numbers copied and packed at a time: at least _LEAST_PIECE, or 1/16 of a large layer, enough for all threads.
_LEAST_PIECE = 2**20
_NUM_PIECES = 16


class NativeLinear:
    """PackedLinear with C++ kernels. Holds the weights as panels."""

    __slots__ = ("_address", "_bias_P", "_kernels", "_norm_I", "_struct", "num_outputs", "packed")

    def __init__(
        self,
        weight_OI: Weight | Sequence[Weight] | PackedWeight,
        bias_O: torch.Tensor | None,
        norm_I: torch.Tensor | None,
        eps: float,
        *,
        gated: bool,
        activation: Activation = "silu",
        soft_cap: float = 0.0,
        kernels: NativeKernels,
    ) -> None:
        assert not (gated and soft_cap)
        layers = list[list[torch.Tensor]]()
        if isinstance(weight_OI, PackedWeight):
            kind, num_rows, num_inputs = WeightKind(weight_OI.kind), weight_OI.num_rows, weight_OI.num_inputs
        else:
            kind, layers = _parts_of_all(weight_OI)
            num_rows, num_inputs = sum(len(parts[0]) for parts in layers), layers[0][0].shape[1]
        self._kernels = kernels
        self.num_outputs = num_rows // 2 if gated else num_rows
        self._norm_I = None if norm_I is None else norm_I.float().contiguous()
        self._struct = LinearStruct(
            norm=None if self._norm_I is None else self._norm_I.data_ptr(),
            eps=eps,
            inputs=num_inputs,
            outputs=self.num_outputs,
            gated=gated,
            weights=kind,
            activation=_ACTIVATIONS[activation],
            soft_cap=soft_cap,
        )
        self._address = ctypes.addressof(self._struct)
        self._bias_P: torch.Tensor | None = None
        if bias_O is not None:
            order_P = _panel_order(num_rows, kernels.panel_width(self._address), gated=gated)
            self._bias_P = torch.where(order_P >= 0, bias_O.float()[order_P.clamp(min=0)], 0.0)
            self._struct.bias = self._bias_P.data_ptr()
        if isinstance(weight_OI, PackedWeight):
            panels = weight_OI.panels
            assert panels.nbytes == kernels.packed_bytes(self._address)
        else:
            panels = _packed(kernels, self._struct, layers)
        self._struct.panels = panels.data_ptr()
        self.packed = PackedWeight(kind=self._struct.weights, num_rows=num_rows, num_inputs=num_inputs, panels=panels)

    @property
    def num_bytes(self) -> int:
        return self.packed.panels.nbytes

    def __call__(self, x_TI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        shape = x_TI.shape[0], self.num_outputs
        y_TO = torch.empty(shape) if out is None else out
        assert y_TO.shape == shape
        self._run(x_TI, y_TO, Epilogue.STORE)
        return y_TO

    def add_to_(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        self._run(x_TI, y_TO, Epilogue.ADD)

    def add_through_(self, last: "NativeLinear", x_TI: torch.Tensor, between: torch.Tensor, into: torch.Tensor) -> None:
        """Like PackedLinear's. between: memory for what passes between the layers, in a form of the path's."""
        assert between.shape == (x_TI.shape[0], self.num_outputs)
        are_halves = {self._struct.weights, last._struct.weights} <= _HALVES
        is_pair = are_halves and self._struct.gated and last._norm_I is None
        self._run(x_TI, between, Epilogue.STORE_FOR_NEXT if is_pair else Epilogue.STORE)
        last._run(between, into, Epilogue.ADD_FROM_LAST if is_pair else Epilogue.ADD)

    def argmax(
        self, x_TI: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self._struct.gated
        assert x_TI.dtype is torch.float32
        assert x_TI.is_contiguous()
        ids_T, values_T = out or (torch.empty(len(x_TI), dtype=torch.int64), torch.empty(len(x_TI)))
        assert (ids_T.dtype, values_T.dtype) == (torch.int64, torch.float32)
        assert ids_T.shape == values_T.shape == x_TI.shape[:1]
        self._kernels.linear_argmax(self._address, x_TI.data_ptr(), len(x_TI), ids_T.data_ptr(), values_T.data_ptr())
        return ids_T, values_T

    def masked_argmax(self, x_TI: torch.Tensor, masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self._struct.gated
        assert x_TI.dtype is torch.float32
        assert x_TI.is_contiguous()
        assert len(masks) == len(x_TI)
        num_words = -(-self.num_outputs // 32)
        assert all(each is None or (each.dtype == np.int32 and each.shape == (num_words,)) for each in masks)
        masks_T = np.array([0 if each is None else each.ctypes.data for each in masks], np.int64)
        ids_T, values_T = torch.empty(len(x_TI), dtype=torch.int64), torch.empty(len(x_TI))
        self._kernels.masked_argmax(
            self._address, x_TI.data_ptr(), len(x_TI), ids_T.data_ptr(), values_T.data_ptr(), masks_T.ctypes.data
        )
        return ids_T, values_T

    def _run(self, x_TI: torch.Tensor, y_TO: torch.Tensor, epilogue: Epilogue) -> None:
        assert epilogue is Epilogue.STORE or not self._struct.soft_cap
        assert x_TI.dtype is y_TO.dtype is torch.float32
        assert x_TI.is_contiguous()
        assert y_TO.is_contiguous()
        num_rows = x_TI.shape[0]
        if num_rows:
            self._kernels.linear(self._address, x_TI.data_ptr(), num_rows, y_TO.data_ptr(), epilogue)


def _parts_of_all(weight: Weight | Sequence[Weight]) -> tuple[WeightKind, list[list[torch.Tensor]]]:
    """Returns the common kind of layers whose outputs are concatenated, and the parts of each."""
    weights = weight if isinstance(weight, Sequence) else [weight]
    found = [_parts(each) for each in weights]
    if len({kind for kind, _ in found}) > 1:
        found = [_parts(concatenate(weights))]
    return found[0][0], [parts for _, parts in found]


def _packed(kernels: NativeKernels, whole: LinearStruct, layers: list[list[torch.Tensor]]) -> torch.Tensor:
    """Returns the panels of concatenated layers. Weights in bfloat16 are packed in 12 bits where the path has such
    linears, and their exponents allow it: whole.weights says so then."""
    address = ctypes.addressof(whole)
    if whole.weights == WeightKind.BFLOAT16:
        whole.weights = WeightKind.SHORT_BFLOAT16
        if num_bytes := kernels.packed_bytes(address):
            panels = kernels.weights.empty(num_bytes, torch.uint8)
            if _pack(kernels, whole, layers, panels):
                return panels
            kernels.weights.take_back(panels)
        whole.weights = WeightKind.BFLOAT16
    panels = kernels.weights.empty(kernels.packed_bytes(address), torch.uint8)
    fits = _pack(kernels, whole, layers, panels)
    assert fits
    return panels


def _pack(kernels: NativeKernels, whole: LinearStruct, layers: list[list[torch.Tensor]], panels: torch.Tensor) -> bool:
    """Packs some panels at a time from copies of their rows, so that several layers are never concatenated as a whole.
    A panel's contents and place depend only on its own rows. Returns False if the kind can't hold these weights."""
    num_inputs = whole.inputs
    columns = kernels.panel_width(ctypes.addressof(whole)) // (2 if whole.gated else 1)
    num_panels = -(-whole.outputs // columns)
    assert panels.nbytes % num_panels == 0
    step = columns * max(_LEAST_PIECE // (columns * num_inputs), num_panels // _NUM_PIECES, 1)
    most = min(step, whole.outputs) * (2 if whole.gated else 1)
    # Reused for all pieces: malloc would find other memory for each.
    copies = [passing_memory((most, *part.shape[1:]), part.dtype) for part in layers[0]]
    for first in range(0, whole.outputs, step):
        count = min(step, whole.outputs - first)
        starts = (first, first + whole.outputs) if whole.gated else (first,)
        for part, copy in enumerate(copies):
            rows = [rows for start in starts for rows in _rows([layer[part] for layer in layers], start, count)]
            torch.cat(rows, out=copy[: count * len(starts)])
        piece = LinearStruct(
            inputs=num_inputs,
            outputs=count,
            gated=whole.gated,
            weights=whole.weights,
            activation=whole.activation,
        )
        addresses = [copy.data_ptr() for copy in copies] + [None] * (3 - len(copies))
        place = panels.data_ptr() + first // columns * (panels.nbytes // num_panels)
        if not kernels.pack(ctypes.addressof(piece), *addresses, place):
            return False
    return True


def _rows(layers: list[torch.Tensor], first: int, count: int) -> list[torch.Tensor]:
    """Returns rows first to first + count - 1 of concatenated layers, as one slice per layer that has some."""
    found = list[torch.Tensor]()
    for layer in layers:
        found.append(layer[max(first, 0) : max(first + count, 0)])
        first -= len(layer)
    return [rows for rows in found if len(rows)]


def _parts(weight: Weight) -> tuple[WeightKind, list[torch.Tensor]]:
    """Returns the kind, and the tensors to pack: values, and scales and minima if any; zeros as negative halves. FP8 is
    packed as floats."""
    if isinstance(weight, Int4Weight):
        if weight.has_zeros:
            return WeightKind.INT4_ZEROS, [weight.values_OI, weight.scales_OG, -weight.minima_OG.half()]
        return WeightKind.INT4, [weight.values_OI, weight.scales_OG, weight.minima_OG]
    if isinstance(weight, Int8Weight):
        kind = WeightKind.GROUPED_INT8 if weight.is_grouped else WeightKind.INT8
        return kind, [weight.values_OI, weight.scales_OG]
    floats_OI = dequantize(weight)
    return (WeightKind.BFLOAT16 if floats_OI.dtype is torch.bfloat16 else WeightKind.FLOAT32), [floats_OI]


def _panel_order(num_rows: int, width: int, *, gated: bool) -> torch.Tensor:
    """int64: the weight row of each column of the panels, -1 for padding. If gated, a panel's first half holds gates
    and its second half the matching ups."""
    if not gated:
        rows = torch.arange(-(-num_rows // width) * width)
        return torch.where(rows < num_rows, rows, -1)
    half, num_gates = width // 2, num_rows // 2
    gates = torch.arange(-(-num_gates // half) * half).view(-1, half)
    rows = torch.cat((gates, gates + num_gates), dim=1)
    return torch.where((gates < num_gates).repeat(1, 2), rows, -1).flatten()
