"""Scales of a checkpoint for a KV cache of e4m3: number = scale * stored."""

import math

from worker.weights.errors import WeightsError
from worker.weights.safetensors_files import SafetensorsFiles

# At the attention, or at the layer that makes k or v; compressed-tensors calls it the scale of that layer's output, and
# the first AutoFP8 had one for both.
_K_NAMES, _V_NAMES = (
    (f"{x}_scale", f"attn.{x}_scale", f"{x}_proj.{x}_scale", f"{x}_proj.output_scale", "kv_scale", "attn.kv_scale")
    for x in "kv"
)


def kv_scale(files: SafetensorsFiles, attention: str) -> tuple[float, float] | None:
    """Of keys and of values; None if there are none. attention: such as model.layers.3.self_attn. Raises WeightsError
    for a scale that is not one positive number, and for one without the other."""
    k, v = _found(files, attention, _K_NAMES), _found(files, attention, _V_NAMES)
    if k is None and v is None:
        return None
    if k is None or v is None:
        missing = _K_NAMES[0] if k is None else _V_NAMES[0]
        raise WeightsError(f"{files.path}: {attention}.{missing} is missing beside {v or k}; a KV cache needs both")
    return _number(files, k), _number(files, v)


def _found(files: SafetensorsFiles, attention: str, names: tuple[str, ...]) -> str | None:
    return next((name for name in (f"{attention}.{name}" for name in names) if name in files.shapes), None)


def _number(files: SafetensorsFiles, name: str) -> float:
    scale = files.read(name)
    if scale.numel() != 1:
        raise WeightsError(f"{files.path}: {name} has shape {list(scale.shape)}; one scale for a layer is supported")
    number = float(scale)
    if not (number > 0 and math.isfinite(number)):
        raise WeightsError(f"{files.path}: {name} is {number}; a scale is positive and finite")
    return number
