"""Reads the tensors of a Hugging Face directory: its files, and the scales of quantized tensors."""

import json
import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear.weights import Fp8Weight, Int8Weight, Weight, e4m3_floats, scaled_
from worker.weights.conversion import converted
from worker.weights.quantization import FP8_BLOCKS, Scheme, StoredQuantization
from worker.weights.reader import Shape, WeightsError, some

INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Returns a directory's safetensors files, sorted by name. Raises WeightsError if there are none or shards are
    missing."""
    index = directory / INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory}: no *.safetensors file; weights come from safetensors or GGUF only")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index with a weight_map: {error}") from None
    # The index is untrusted: a name in it must not lead out of the directory.
    bad = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if bad:
        raise WeightsError(f"{index}: {some([repr(name) for name in bad])} is not a file name")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightsError(
            f"{directory}: {len(missing)} of the {len(names)} shards in {INDEX} are missing: {some(missing)}"
        )
    return [directory / name for name in names]


class SafetensorsFiles:
    """The safetensors files of a directory, mapped into memory. Raises WeightsError for a damaged one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.files = weight_files(directory)
        self.shapes: dict[str, Shape] = {}
        # In safetensors' spelling, such as BF16 and F8_E4M3.
        self.dtypes: dict[str, str] = {}
        self._owner: dict[str, safe_open] = {}
        for file in self.files:
            try:
                opened = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - a safe_open is no dict
                    stored = opened.get_slice(name)
                    self.shapes[name] = tuple(stored.get_shape())
                    self.dtypes[name] = stored.get_dtype()
                    self._owner[name] = opened
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file}: damaged or cut short: {error}") from None

    def stored_name(self, name: str) -> str:
        """Returns a tensor's name in the checkpoint, which its config.json uses, too."""
        return name

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Returns a tensor as it is stored, a view of the file. rows: only these rows."""
        return self._read_rows(name, rows)

    def _read_rows(self, stored: str, rows: slice | None) -> torch.Tensor:
        if rows is None:
            return self._read(stored, lambda file, stored: file.get_tensor(stored))
        return self._read(stored, lambda file, stored: file.get_slice(stored)[rows.start : rows.stop])

    def _read(self, stored: str, get: Callable[[safe_open, str], torch.Tensor]) -> torch.Tensor:
        try:
            return get(self._owner[stored], stored)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.path}: {stored} cannot be read: {error}") from None


# Scales belong to the attention or to the layer that computes k or v; compressed-tensors names them scales of that
# layer's output, and the first AutoFP8 had one for both.
_K_NAMES, _V_NAMES = (
    (f"{x}_scale", f"attn.{x}_scale", f"{x}_proj.{x}_scale", f"{x}_proj.output_scale", "kv_scale", "attn.kv_scale")
    for x in "kv"
)


def kv_scale(files: SafetensorsFiles, attention: str) -> tuple[float, float] | None:
    """Returns the scales of keys and of values, or None if there are none. attention: such as model.layers.3.self_attn.
    Raises WeightsError for a scale that is not one positive number, and for one without the other."""
    k, v = _found(files, attention, _K_NAMES), _found(files, attention, _V_NAMES)
    if k is None and v is None:
        return None
    if k is None or v is None:
        missing = _K_NAMES[0] if k is None else _V_NAMES[0]
        raise WeightsError(f"{files.path}: {attention}.{missing} is missing beside {v or k}; a KV cache needs both")
    return _scale_number(files, k), _scale_number(files, v)


def _found(files: SafetensorsFiles, attention: str, names: tuple[str, ...]) -> str | None:
    return next((name for name in (f"{attention}.{name}" for name in names) if name in files.shapes), None)


def _scale_number(files: SafetensorsFiles, name: str) -> float:
    scale = files.read(name)
    if scale.numel() != 1:
        raise WeightsError(f"{files.path}: {name} has shape {list(scale.shape)}: only one scale per layer is supported")
    number = float(scale)
    if not (number > 0 and math.isfinite(number)):
        raise WeightsError(f"{files.path}: {name} is {number}: a scale must be positive and finite")
    return number


_FLOATS = ("F32", "BF16", "F16", "F64")
# A quantized layer may have these, too. They are ignored on purpose: inputs get their own scales at run time (in int8
# one for every 32 of a token's numbers; in e4m3 one per token, or for every 128 of its numbers), which fit at least as
# well as one calibrated scale for all inputs.
_SCALES_OF_INPUTS = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point")
# Scales for an e4m3 KV cache, of the layers that compute KV or of the attention around them.
_SCALES_OF_KV = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")


class SafetensorsSource:
    """A TensorSource over safetensors files. Raises WeightsError, naming the tensor, unless each tensor is stored as
    `stored` says and has its scales."""

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
        """Returns rows in float32. Blocks that the rows would split are read in full."""
        total = self.shapes[name][0]
        height = scheme.block[0] or total
        blocks = slice(rows.start // height, -(-rows.stop // height)) if height < total else slice(0, 1)
        whole = slice(blocks.start * height, min(blocks.stop * height, total)) if height < total else rows
        values = self._files.read(name, whole)
        floats = values.float() if scheme.kind == "I8" else e4m3_floats(values)
        scaled = scaled_(floats, scales_YX[blocks], (min(height, len(floats)), scheme.block[1]))
        return scaled[rows.start - whole.start : rows.stop - whole.start]

    def _scales_YX(self, name: str, scheme: Scheme) -> torch.Tensor:
        """Returns a weight's scales, in float32."""
        scale = _scale_of(self._files, name, scheme)
        scales_YX = self._files.read(scale).float()
        if not scales_YX.isfinite().all():
            raise WeightsError(f"{self.path}: {scale} holds {_first_not_finite(scales_YX)}; scales must be finite")
        return scales_YX.reshape(1, 1) if scheme.block == (0, 0) else scales_YX


def _schemes(files: SafetensorsFiles, stored: StoredQuantization, expected: Collection[str]) -> dict[str, Scheme]:
    """Returns the scheme of each expected weight that is quantized, and checks its dtype and scales."""
    found: dict[str, Scheme] = {}
    for name in expected:
        if name not in files.shapes:
            continue  # check_tensors reports all missing tensors together
        layer = files.stored_name(name).removesuffix(".weight")
        scheme = stored.scheme_of(layer) if _is_linear(name, files.shapes[name]) else None
        dtype = files.dtypes[name]
        if scheme is not None:
            found[name] = scheme
            if dtype != scheme.kind:
                raise WeightsError(
                    f"{files.path}: {name} is stored as {dtype}; {scheme.kind} is expected, because config.json's "
                    "quantization_config does not leave this layer out"
                )
        elif dtype not in _FLOATS:
            raise WeightsError(
                f"{files.path}: {name} is stored as {dtype}; {_one_of(_FLOATS)} is expected, because config.json's "
                "quantization_config does not quantize it"
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
    """Returns the name of the tensor with a weight's scales; if there is none, the name that it should have."""
    scales = [_beside(name, scale_name) for scale_name in scheme.scale_names]
    return next((scale for scale in scales if scale in files.shapes), scales[0])


def _names_of_scales(files: SafetensorsFiles, schemes: dict[str, Scheme], expected: Collection[str]) -> set[str]:
    """Returns the names of scales that the weights need or may have; layers in floats may have scales of KV, too."""
    names = {_scale_of(files, name, scheme) for name, scheme in schemes.items()}
    names |= {_beside(name, kind) for name in schemes for kind in _SCALES_OF_INPUTS}
    linears = [name for name in expected if _is_linear(name, files.shapes.get(name, ()))]
    names |= {_beside(name, kind) for name in linears for kind in _SCALES_OF_KV}
    around = {name.removesuffix(".weight").rpartition(".")[0] for name in linears}
    return names | {f"{module}{attn}.{kind}" for module in around for attn in ("", ".attn") for kind in _SCALES_OF_KV}


def _beside(name: str, other: str) -> str:
    """Maps layer.weight to layer.other."""
    return f"{name.removesuffix('weight')}{other}"


def _first_not_finite(scales: torch.Tensor) -> float:
    return float(scales[~scales.isfinite()][0])
