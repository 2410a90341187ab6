"""Sliding windows as config.json has them: one number for each layer, 0 where it sees everything."""

from collections.abc import Mapping, Sequence
from typing import Any


def window_of_all(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The same window in all layers."""
    return (int(raw.get("sliding_window") or 0),) * num_layers


def windows_if_used(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Windows of Qwen's models: none without use_sliding_window, else those of the layers that layer_types names, or
    of those behind max_window_layers."""
    if not raw.get("use_sliding_window", False):
        return (0,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", num_layers))
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    return windows_by_type(int(raw.get("sliding_window") or 0), types, num_layers)


def windows_by_type(window: int, types: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """The window in layers of sliding_attention. Raises ValueError for other types than that and full_attention."""
    return sizes_by_type(window, types, num_layers, kind="sliding_attention")


def sizes_by_type(size: int, types: Sequence[str], num_layers: int, *, kind: str) -> tuple[int, ...]:
    """The size in layers of `kind`, 0 in those of full_attention. Raises ValueError for another type, or number."""
    if set(types) - {"full_attention", kind} or len(types) != num_layers:
        raise ValueError(f"layer_types: {num_layers} of full_attention or {kind} are expected, not {types}")
    return tuple(size if each == kind else 0 for each in types)
