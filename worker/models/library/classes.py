"""Finds the classes of transformers for a model, or the reason why this backend cannot compute it.

transformers is imported only here and below, and only for models that need it: its import takes seconds.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from worker.model_config import LibraryConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Rotary embeddings whose frequencies depend on the longest sequence of a step, so a token's result would, too.
_ROPES_OF_A_STEP = ("dynamic", "longrope")
# Kinds of layers, as `layer_types` of configs name them.
_STATEFUL = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_INDEXED = frozenset({"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"})


class RefusedError(ValueError):
    """This backend cannot compute a model. The message says why."""


def library_version() -> str:
    return version("transformers")


def library_classes(raw: Mapping[str, Any]) -> "tuple[type[PreTrainedModel], PreTrainedConfig]":
    """Returns the class of a causal language model, and its config. raw: config.json. Raises RefusedError.

    Only classes of the installed library count: code beside the weights is never run.
    """
    architecture = (raw.get("architectures") or ["(none named)"])[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_types = [name for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if cls == architecture]
    if not model_types:
        if raw.get("auto_map"):
            raise RefusedError(
                f"architecture {architecture!r} comes with code of its own (auto_map), which is never run; "
                f"transformers {library_version()} has no class of that name"
            )
        raise RefusedError(
            f"architecture {architecture!r} is no causal language model of transformers {library_version()}"
        )
    cls = getattr(importlib.import_module("transformers"), architecture)
    try:
        config = cls.config_class.from_dict(dict(raw))
    except Exception as error:  # noqa: BLE001 - the library checks fields by classes of its own
        raise RefusedError(f"transformers {library_version()} refuses the config: {error}") from None
    _check_config(architecture, cls, config)
    return cls, config


def _check_config(architecture: str, cls: "type[PreTrainedModel]", config: "PreTrainedConfig") -> None:
    """Raises RefusedError for what the config and the class already tell."""
    if getattr(config, "is_encoder_decoder", False):
        raise RefusedError(f"{architecture} is an encoder-decoder: its decoder attends to an encoder (cross attention)")
    if getattr(config, "add_cross_attention", False):
        raise RefusedError(f"{architecture} has cross attention (add_cross_attention), whose keys are not cached here")
    own = config.get_text_config()
    types = getattr(own, "layer_types", None) or ()
    if getattr(cls, "_is_stateful", False) or not _STATEFUL.isdisjoint(types):
        raise RefusedError(
            f"{architecture} has layers that keep a state of their own, such as state-space layers, convolutions or "
            "linear attention"
        )
    if not _INDEXED.isdisjoint(types):
        raise RefusedError(f"{architecture} has sparse attention, whose index of keys needs a cache of its own")
    if own is not config:
        raise RefusedError(f"{architecture} is for more than text; this backend computes text models only")
    if not hasattr(config, "max_position_embeddings"):
        raise RefusedError(f"{architecture}: config.json has no max_position_embeddings")
    for rope in _rope_types(config):
        if rope in _ROPES_OF_A_STEP:
            raise RefusedError(
                f"rope_type={rope!r}: transformers computes its frequencies from the longest sequence of a step, so a "
                "token's result would depend on other requests"
            )


def _rope_types(config: "PreTrainedConfig") -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in parameters.values() if isinstance(each, Mapping)]
    return [str(each.get("rope_type", "default")) for each in (by_kind or [parameters])]


def meta_model(library: LibraryConfig, attention: str) -> "PreTrainedModel":
    """Returns the model without memory for its tensors, in eval mode. attention: name of the attention function."""
    cls, config = library_classes(library.raw)
    return build_meta(cls, config, attention)


def build_meta(cls: "type[PreTrainedModel]", config: "PreTrainedConfig", attention: str) -> "PreTrainedModel":
    """Like `meta_model`. Raises RefusedError if the library refuses."""
    config._attn_implementation = attention
    config.use_cache = False
    with torch.device("meta"):
        try:
            model = cls(config).eval()
        except KeyError as error:
            if error.args == (attention,):
                raise RefusedError(f"{cls.__name__} does not call attention through the attention interface") from None
            raise RefusedError(f"{cls.__name__} cannot be built from its config: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever a constructor raises for fields that do not fit
            raise RefusedError(f"{cls.__name__} cannot be built from its config: {error}") from None
    model.requires_grad_(requires_grad=False)
    return model
