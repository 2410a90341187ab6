"""Reads the configuration of rotary embeddings: the base, and the scaling that extends a model's context."""

import math
from collections.abc import Mapping
from typing import Any

from worker.model_config import RopeConfig

SCALINGS = ("default", "linear", "llama3", "yarn")


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rope settings of a config.json, under either of their two names."""
    return dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})


def rope_from_config_json(raw: Mapping[str, Any]) -> RopeConfig:
    """Returns the RopeConfig of a config.json: from `rope_parameters` (transformers 5), or from `rope_theta` and
    `rope_scaling` (before it).

    Raises ValueError for a scaling not in SCALINGS, or one that lacks a number.
    """
    settings = rope_settings(raw)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError("rope_parameters differ between layer types: only one set for all layers is supported")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in SCALINGS:
        raise ValueError(f"rope_type={scaling!r} is not supported; one of {', '.join(SCALINGS)} is")
    if settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if scaling == "default":
        return RopeConfig(theta=theta)

    original = settings.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 0)
    factor = settings.get("factor")
    if factor is None and scaling == "yarn":
        factor = raw["max_position_embeddings"] / original
    try:
        if scaling == "linear":
            return RopeConfig(theta=theta, scaling=scaling, factor=_number(factor, "factor"))
        if scaling == "llama3":
            return RopeConfig(
                theta=theta,
                scaling=scaling,
                factor=_number(factor, "factor"),
                original_max_position_embeddings=int(original),
                low_freq_factor=_number(settings.get("low_freq_factor"), "low_freq_factor"),
                high_freq_factor=_number(settings.get("high_freq_factor"), "high_freq_factor"),
            )
        return yarn(
            theta=theta,
            factor=_number(factor, "factor"),
            original_max_position_embeddings=int(original),
            beta_fast=settings.get("beta_fast"),
            beta_slow=settings.get("beta_slow"),
            truncate=bool(settings.get("truncate", True)),
            attention_factor=settings.get("attention_factor"),
            mscale=settings.get("mscale"),
            mscale_all_dim=settings.get("mscale_all_dim"),
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"rope_type={scaling!r}: {error}") from None


def yarn(
    *,
    theta: float,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> RopeConfig:
    """Returns a YaRN RopeConfig (arXiv 2309.00071), with its authors' defaults for each argument that is None."""
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
        beta_fast=beta_fast or 32.0,
        beta_slow=beta_slow or 1.0,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns the factor that sharpens attention for a context `factor` times as long (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is not a number")
    return float(value)
