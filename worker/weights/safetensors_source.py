"""Tensors of a Hugging Face directory, quantized ones with the scales that belong to them.

Legend: O outputs, I inputs, Y and X blocks of them that share a scale.
"""

from collections.abc import Collection
from functools import partial

import torch

from kernels.linear.fp8_weight import Fp8Weight, e4m3_floats, scaled_
from kernels.linear.weights import Int8Weight, Weight
from worker.take_tensor import Shape
from worker.weights.errors import WeightsError, some
from worker.weights.kv_scales import kv_scale
from worker.weights.pieces import converted
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.stored_quantization import FP8_BLOCKS, Scheme, StoredQuantization

_FLOATS = ("F32", "BF16", "F16", "F64")
# A quantized layer may have these, too. They are left aside on purpose: inputs get scales of their own as they come (in
# int8 for each 32 of a token's numbers; in e4m3 for a token, or each 128 of it), which fit them at least as well as one
# for all that was set beforehand.
_SCALES_OF_INPUTS = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point")
# These are for a KV cache of e4m3. Beside the layers that make it, or at the attention around them.
_SCALES_OF_KV = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")


class SafetensorsSource:
    """A TensorSource over safetensors files. Raises WeightsError, naming the tensor, unless each one is stored as
    `stored` says, and has its scales."""

    def __init__(self, files: SafetensorsFiles, stored: StoredQuantization, expected: Collection[str]) -> None:
        """expected: the model's tensors."""
        self.path = files.path
        self._files = files
        self._schemes = _schemes(files, stored, expected)
        self.shapes: dict[str, Shape] = dict(files.shapes)
        for name in _names_of_scales(files, self._schemes, expected):
            self.shapes.pop(name, None)

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        scheme, shape = self._schemes.get(name), self.shapes[name]
        if scheme is None:
            values = self._files.read(name, rows)
            if dtype is None or dtype is values.dtype:
                return values
            if not shape:
                return values.to(dtype)
            return converted(tuple(values.shape), dtype, values.__getitem__, slice(0, len(values)))
        floats = partial(self._dequantized, name, scheme, self._scales_YX(name, scheme))
        return converted(shape, dtype or torch.float32, floats, rows or slice(0, shape[0]))

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        scheme = self._schemes.get(name)
        if scheme is not None and scheme.kind == "I8":
            scales_O1 = self._scales_YX(name, scheme).expand(self.shapes[name][0], 1)
            scales_O1 = scales_O1 if rows is None else scales_O1[rows]
            return Int8Weight(values_OI=self._files.read(name, rows), scales_OG=scales_O1.contiguous())
        if scheme is not None and scheme.block in FP8_BLOCKS and rows is None:
            return Fp8Weight(values_OI=self._files.read(name), scales=self._scales_YX(name, scheme))
        return self.tensor(name, None, rows)

    def is_left_out(self, name: str) -> bool:
        return bool(self._schemes) and name not in self._schemes

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return kv_scale(self._files, attention)

    def _dequantized(self, name: str, scheme: Scheme, scales_YX: torch.Tensor, rows: slice) -> torch.Tensor:
        """float32. Blocks that the rows would cut are read as a whole."""
        total = self.shapes[name][0]
        height = scheme.block[0] or total
        blocks = slice(rows.start // height, -(-rows.stop // height)) if height < total else slice(0, 1)
        whole = slice(blocks.start * height, min(blocks.stop * height, total)) if height < total else rows
        values = self._files.read(name, whole)
        floats = values.float() if scheme.kind == "I8" else e4m3_floats(values)
        scaled = scaled_(floats, scales_YX[blocks], (min(height, len(floats)), scheme.block[1]))
        return scaled[rows.start - whole.start : rows.stop - whole.start]

    def _scales_YX(self, name: str, scheme: Scheme) -> torch.Tensor:
        """float32."""
        scale = _scale_of(self._files, name, scheme)
        scales_YX = self._files.read(scale).float()
        if not scales_YX.isfinite().all():
            raise WeightsError(f"{self.path}: {scale} holds {_first_not_finite(scales_YX)}; scales must be finite")
        return scales_YX.reshape(1, 1) if scheme.block == (0, 0) else scales_YX


def _schemes(files: SafetensorsFiles, stored: StoredQuantization, expected: Collection[str]) -> dict[str, Scheme]:
    """Of each expected weight that is quantized."""
    found: dict[str, Scheme] = {}
    for name in expected:
        if name not in files.shapes:
            continue  # all tensors that a model lacks are told of together
        layer = files.stored_name(name).removesuffix(".weight")
        scheme = stored.scheme_of(layer) if _is_linear(name, files.shapes[name]) else None
        dtype = files.dtypes[name]
        if scheme is not None:
            found[name] = scheme
            if dtype != scheme.kind:
                raise WeightsError(
                    f"{files.path}: {name} is stored as {dtype}; by config.json's quantization_config it is "
                    f"{scheme.kind}, for it is not among the layers left out there"
                )
        elif dtype not in _FLOATS:
            raise WeightsError(
                f"{files.path}: {name} is stored as {dtype}; {_one_of(_FLOATS)} is expected, for config.json's "
                "quantization_config says nothing else"
            )
    scales = {_scale_of(files, name, scheme): name for name, scheme in found.items()}
    missing = [scale for scale in scales if scale not in files.shapes]
    if missing:
        raise WeightsError(f"{files.path}: lacks the scales of {len(missing)} of {len(found)} weights: {some(missing)}")
    for scale, name in scales.items():
        _check_scale(files, scale, name, found[name])
    return found


def _check_scale(files: SafetensorsFiles, scale: str, name: str, scheme: Scheme) -> None:
    dtype, shape = files.dtypes[scale], files.shapes[scale]
    if dtype not in _FLOATS:
        raise WeightsError(f"{files.path}: {scale} is stored as {dtype}; {_one_of(_FLOATS)} is expected")
    shapes = scheme.scale_shapes(files.shapes[name])
    if shape not in shapes:
        raise WeightsError(
            f"{files.path}: {scale} has shape {list(shape)}; {list(shapes[0])} is expected for {name}, of shape "
            f"{list(files.shapes[name])}"
        )


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_linear(name: str, shape: Shape) -> bool:
    return name.endswith(".weight") and len(shape) == 2 and ".embed_tokens." not in name


def _scale_of(files: SafetensorsFiles, name: str, scheme: Scheme) -> str:
    """The tensor with the scales of a weight, or the name that it should have."""
    scales = [_beside(name, scale_name) for scale_name in scheme.scale_names]
    return next((scale for scale in scales if scale in files.shapes), scales[0])


def _names_of_scales(files: SafetensorsFiles, schemes: dict[str, Scheme], expected: Collection[str]) -> set[str]:
    """Those that the weights need, and those that may be there: those of KV also beside floats."""
    names = {_scale_of(files, name, scheme) for name, scheme in schemes.items()}
    names |= {_beside(name, kind) for name in schemes for kind in _SCALES_OF_INPUTS}
    linears = [name for name in expected if _is_linear(name, files.shapes.get(name, ()))]
    names |= {_beside(name, kind) for name in linears for kind in _SCALES_OF_KV}
    around = {name.removesuffix(".weight").rpartition(".")[0] for name in linears}
    return names | {f"{module}{attn}.{kind}" for module in around for attn in ("", ".attn") for kind in _SCALES_OF_KV}


def _beside(name: str, other: str) -> str:
    """layer.weight -> layer.other"""
    return f"{name.removesuffix('weight')}{other}"


def _first_not_finite(scales: torch.Tensor) -> float:
    return float(scales[~scales.isfinite()][0])
