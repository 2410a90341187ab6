"""Reads the configuration of rotary embeddings: the base, and the scaling that extends a model's context."""

import math
from collections.abc import Mapping
from typing import Any

from worker.model_config import RopeConfig

SCALINGS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
# Every fourth layer has no rope, in models that have such layers and do not name them.
_ROPE_INTERVAL = 4


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rope settings of a config.json, under either of their two names."""
    return dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})


def partial_rotary_factor(raw: Mapping[str, Any], default: float = 1.0) -> float:
    """Returns the part of a head that rope rotates."""
    return float(rope_settings(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", default)))


def rope_dims(raw: Mapping[str, Any], default: float = 1.0) -> int:
    """Returns the numbers of a head that rope rotates, as transformers computes them."""
    head_size = int(raw.get("head_dim") or int(raw["hidden_size"]) // int(raw["num_attention_heads"]))
    return int(head_size * partial_rotary_factor(raw, default))


def rope_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Returns True for each layer with rope, in models that have layers without."""
    # Despite its name, it has a 1 for each layer with rope.
    said = raw.get("no_rope_layers")
    if not said:
        interval = int(raw.get("no_rope_layer_interval") or _ROPE_INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(said) < num_layers:
        raise ValueError(f"no_rope_layers has {len(said)} numbers for {num_layers} layers: there must be one per layer")
    return tuple(bool(number) for number in said[:num_layers])


def rope_from_config_json(raw: Mapping[str, Any], *, is_partial: bool = False) -> RopeConfig:
    """Returns the RopeConfig of a config.json: from `rope_parameters` (transformers 5), or from `rope_theta` and
    `rope_scaling` (before it). is_partial: the family reads partial_rotary_factor, so it may differ from 1.

    Raises ValueError for a scaling not in SCALINGS, or one that lacks a number.
    """
    settings = rope_settings(raw)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError("rope_parameters differ between layer types: only one set for all layers is supported")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in SCALINGS:
        raise ValueError(f"rope_type={scaling!r} is not supported; one of {', '.join(SCALINGS)} is")
    if partial_rotary_factor(raw) != 1.0 and not is_partial:
        raise ValueError("partial_rotary_factor other than 1 is not supported for this architecture")
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if scaling == "default":
        return RopeConfig(theta=theta)

    original = settings.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    factor = settings.get("factor")
    try:
        if factor is None and scaling == "yarn":
            longest = _tokens(raw.get("max_position_embeddings"), "max_position_embeddings")
            factor = longest / _tokens(original, "original_max_position_embeddings")
        if scaling == "linear":
            return RopeConfig(theta=theta, scaling=scaling, factor=positive_number(factor, "factor"))
        if scaling == "llama3":
            return RopeConfig(
                theta=theta,
                scaling=scaling,
                factor=positive_number(factor, "factor"),
                original_max_position_embeddings=_tokens(original, "original_max_position_embeddings"),
                low_freq_factor=positive_number(settings.get("low_freq_factor"), "low_freq_factor"),
                high_freq_factor=positive_number(settings.get("high_freq_factor"), "high_freq_factor"),
            )
        if scaling == "dynamic":
            context = _tokens(raw.get("max_position_embeddings"), "max_position_embeddings")
            return RopeConfig(
                theta=theta,
                scaling=scaling,
                factor=positive_number(factor, "factor"),
                original_max_position_embeddings=context,
                length=context,
            )
        if scaling == "longrope":
            return _longrope(raw, settings, theta)
        return yarn(
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=settings.get("beta_fast"),
            beta_slow=settings.get("beta_slow"),
            truncate=bool(settings.get("truncate", True)),
            attention_factor=settings.get("attention_factor"),
            mscale=settings.get("mscale"),
            mscale_all_dim=settings.get("mscale_all_dim"),
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"rope_type={scaling!r}: {error}") from None


def ropes_by_type(raw: Mapping[str, Any], theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Returns the ropes of layers with full attention and of those with a window; in old files scaling does not apply
    to the latter. theta, local_theta: for files that don't name them."""
    by_type = raw.get("rope_parameters") or {}
    settings = {
        "max_position_embeddings": raw["max_position_embeddings"],
        "rope_theta": raw.get("rope_theta", theta),
        "rope_scaling": raw.get("rope_scaling"),
        "rope_parameters": by_type.get("full_attention"),
    }
    local = {
        "max_position_embeddings": raw["max_position_embeddings"],
        "rope_theta": local_theta,
        "rope_parameters": by_type.get("sliding_attention"),
    }
    return rope_from_config_json(settings), rope_from_config_json(local)


def _longrope(raw: Mapping[str, Any], settings: Mapping[str, Any], theta: float) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753), with the attention factor of Phi-3's authors, which depends on both contexts."""
    context = _tokens(raw.get("max_position_embeddings"), "max_position_embeddings")
    said = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = _tokens(said or context, "original_max_position_embeddings")
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        stretched = positive_number(settings.get("factor") or context / original, "factor")
        attention_factor = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    short, long = (_factors(settings.get(name), name, rope_dims(raw) // 2) for name in ("short_factor", "long_factor"))
    return RopeConfig(
        theta=theta,
        scaling="longrope",
        original_max_position_embeddings=original,
        attention_factor=positive_number(attention_factor, "attention_factor"),
        short_factors=short,
        long_factors=long,
        length=context,
    )


def yarn(
    *,
    theta: float,
    factor: Any,
    original_max_position_embeddings: Any,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> RopeConfig:
    """Returns a YaRN RopeConfig (arXiv 2309.00071), with its authors' defaults for each argument that is None.

    factor and original_max_position_embeddings are as a file has them. Raises TypeError if they are no such numbers.
    """
    factor = positive_number(factor, "factor")
    original = _tokens(original_max_position_embeddings, "original_max_position_embeddings")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast or 32.0,
        beta_slow=beta_slow or 1.0,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns the factor that sharpens attention for a context `factor` times as long (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _factors(value: Any, name: str, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count:
        raise TypeError(f"{name}={value!r}: a list of {count} numbers is expected, one for each pair that rope rotates")
    return tuple(positive_number(number, name) for number in value)


def positive_number(value: Any, name: str) -> float:
    """Raises TypeError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TypeError(f"{name}={value!r} is not a number above 0")
    return float(value)


def _tokens(value: Any, name: str) -> int:
    """A length of sequences."""
    if (number := positive_number(value, name)) < 2:
        raise TypeError(f"{name}={value!r}: a context has at least 2 tokens")
    return int(number)
