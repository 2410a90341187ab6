"""Reads the tensors of a Hugging Face directory: floats, and quantized layers by their schemes."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from kernels.linear.weights import Weight
from worker.weights.conversion import converted
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import FLOATS, Scheme, StoredLayer, StoredQuantization, beside, one_of
from worker.weights.reader import Shape, WeightsError, some
from worker.weights.safetensors_files import SafetensorsFiles

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


# Scales for an e4m3 KV cache, of the layers that compute KV or of the attention around them.
_SCALES_OF_KV = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")


class SafetensorsSource:
    """A TensorSource over safetensors files. Raises WeightsError, naming the tensor, unless each tensor is stored as
    `stored` says and has its scales."""

    def __init__(self, files: SafetensorsFiles, stored: StoredQuantization, expected: Mapping[str, Shape]) -> None:
        """expected: the model's tensors."""
        self.path: Path = files.path
        self._files, self._stored = files, stored
        self._layers = _open_layers(files, stored, expected)
        self.shapes: dict[str, Shape] = dict(files.shapes)
        for name in _names_of_kv_scales(expected):
            self.shapes.pop(name, None)
        for name in {name for layer in self._layers.values() for name in layer.tensors} - set(expected):
            self.shapes.pop(name, None)
        self.shapes |= {name: layer.shape for name, layer in self._layers.items()}

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        layer, shape = self._layers.get(name), self.shapes[name]
        if layer is not None:
            return converted(shape, dtype or torch.float32, layer.floats, rows or slice(0, shape[0]))
        values = self._files.read(name, rows)
        if dtype is None or dtype is values.dtype:
            return values
        if not shape:
            return values.to(dtype)
        return converted(tuple(values.shape), dtype, values.__getitem__, slice(0, len(values)))

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        layer = self._layers.get(name)
        weight = None if layer is None else layer.weight(rows)
        return self.tensor(name, None, rows) if weight is None else weight

    def is_left_out(self, name: str) -> bool:
        return bool(self._layers) and name not in self._layers

    def is_packed_for(self, quantization: Quantization) -> bool:
        return quantization != "none" and self._stored.is_packed and quantization == self._stored.made_for

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return kv_scale(self._files, attention)


def _open_layers(
    files: SafetensorsFiles, stored: StoredQuantization, expected: Mapping[str, Shape]
) -> dict[str, StoredLayer]:
    """Opens each expected weight that is quantized, and checks that the others are stored as floats. Weights that the
    files lack altogether are left to check_tensors, which reports all of them together."""
    # By the name of a stored weight; a packed one may consist of several expected ones.
    schemes: dict[str, Scheme] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for name, shape in expected.items():
        fused = files.whole_of(name) if stored.is_packed and name not in files.shapes else ()
        whole = fused[0] if fused else name
        layer = files.stored_name(whole).removesuffix(".weight") if _is_linear(name, shape) else None
        scheme = None if layer is None else stored.scheme_of(layer)
        if scheme is not None and scheme.holds(files, whole):
            schemes[whole] = scheme
            if fused:
                parts[whole] = fused[1:]
        elif files.dtypes.get(name, "F32") not in FLOATS:
            why = "does not quantize it" if scheme is None else f"says {stored.description}"
            raise WeightsError(
                f"{files.path}: {name} is stored as {files.dtypes[name]}; {one_of(FLOATS)} is expected, because "
                f"config.json's quantization_config {why}"
            )
    if stored.is_packed and not schemes:
        raise WeightsError(
            f"{files.path}: stores no weight as config.json's quantization_config says ({stored.description})"
        )
    missing = [tensor for name, scheme in schemes.items() for tensor in scheme.missing(files, name)]
    if missing:
        raise WeightsError(
            f"{files.path}: lacks {len(missing)} tensors of {len(schemes)} quantized weights: {some(missing)}; "
            f"config.json says {stored.description}"
        )
    opened = {name: scheme.open(files, name) for name, scheme in schemes.items()}
    for whole, names in parts.items():
        opened |= _parts_of(files, whole, opened.pop(whole), names, expected)
    return opened


def _parts_of(
    files: SafetensorsFiles, whole: str, layer: StoredLayer, names: tuple[str, ...], expected: Mapping[str, Shape]
) -> dict[str, StoredLayer]:
    """Splits the outputs of a packed layer among the expected weights that it consists of."""
    num_outputs = sum(expected[name][0] for name in names)
    if layer.shape[0] != num_outputs:
        raise WeightsError(
            f"{files.path}: {whole} has {layer.shape[0]} outputs; {num_outputs} are expected, those of "
            f"{', '.join(names)}"
        )
    found: dict[str, StoredLayer] = {}
    first = 0
    for name in names:
        found[name] = _Part(layer, first, expected[name][0])
        first += expected[name][0]
    return found


class _Part:
    """A StoredLayer: successive outputs of another one."""

    def __init__(self, layer: StoredLayer, first: int, num_outputs: int) -> None:
        self.shape: Shape = (num_outputs, *layer.shape[1:])
        self.tensors: Collection[str] = layer.tensors
        self._layer, self._first = layer, first

    def floats(self, rows: slice) -> torch.Tensor:
        return self._layer.floats(self._moved(rows))

    def weight(self, rows: slice | None) -> Weight | None:
        return self._layer.weight(self._moved(rows or slice(0, self.shape[0])))

    def _moved(self, rows: slice) -> slice:
        return slice(self._first + rows.start, self._first + rows.stop)


def _is_linear(name: str, shape: Shape) -> bool:
    return name.endswith(".weight") and len(shape) == 2 and ".embed_tokens." not in name


def _names_of_kv_scales(expected: Mapping[str, Shape]) -> set[str]:
    """Returns the names of scales of KV that the linear layers, in floats or not, and the modules around them may
    have."""
    linears = [name for name, shape in expected.items() if _is_linear(name, shape)]
    names = {beside(name, kind) for name in linears for kind in _SCALES_OF_KV}
    around = {name.removesuffix(".weight").rpartition(".")[0] for name in linears}
    return names | {f"{module}{attn}.{kind}" for module in around for attn in ("", ".attn") for kind in _SCALES_OF_KV}
