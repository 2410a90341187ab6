"""Reads sliding windows from config.json: one number for each layer, 0 for full attention."""

from collections.abc import Mapping, Sequence
from typing import Any


def window_of_all(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the same window for all layers."""
    return (int(raw.get("sliding_window") or 0),) * num_layers


def windows_if_used(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the windows of Qwen's models. Without use_sliding_window no layer has one; otherwise those that
    layer_types names, or those from layer max_window_layers on."""
    if not raw.get("use_sliding_window", False):
        return (0,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", num_layers))
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    return windows_by_type(int(raw.get("sliding_window") or 0), types, num_layers)


def alternating_windows(raw: Mapping[str, Any], num_layers: int, *, period: int) -> tuple[int, ...]:
    """Returns the windows that layer_types names; without it, every period-th layer has full attention."""
    types = raw.get("layer_types")
    if types is None:
        types = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(num_layers)]
    return windows_by_type(int(raw.get("sliding_window") or 0), types, num_layers)


def windows_by_type(window: int, types: Sequence[str], num_layers: int) -> tuple[int, ...]:
    """Returns the window for layers of type sliding_attention, 0 for full_attention. Raises ValueError for other
    types."""
    return sizes_by_type(window, types, num_layers, kind="sliding_attention")


def sizes_by_type(size: int, types: Sequence[str], num_layers: int, *, kind: str) -> tuple[int, ...]:
    """Returns `size` for layers of type `kind`, 0 for full_attention. Raises ValueError for another type or number of
    types."""
    if set(types) - {"full_attention", kind} or len(types) != num_layers:
        raise ValueError(f"layer_types: {num_layers} of full_attention or {kind} are expected, not {types}")
    return tuple(size if each == kind else 0 for each in types)
