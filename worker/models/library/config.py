"""Makes a ModelConfig of a model that transformers computes, from config.json and from a probe of its modules."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from worker.model_config import NO_ROPE, AttentionSpan, LibraryConfig, ModelConfig
from worker.models.library.attention import ASKED, AskedLayer, register
from worker.models.library.classes import RefusedError, build_meta, library_classes, library_version
from worker.models.library.experts import register_experts
from worker.models.library.head import AroundHead
from worker.models.library.modules import Exchanged, exchange, fuse
from worker.models.library.probe import Watched, fusible, probe
from worker.models.library.stages import layer_list

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The C++ kernels compute heads of a multiple of 8 numbers; smaller ones are padded with zeros.
_HEAD_MULTIPLE = 8


def library_config(raw: Mapping[str, Any], text: str, *, shared: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a model that transformers computes. raw, text: config.json. shared: fields of the result
    that are read as for any model. Raises RefusedError, saying why, if this backend cannot compute it."""
    cls, config = library_classes(raw)
    register()
    register_experts()
    exchanged = exchange(build_meta(cls, config, ASKED))
    watched = probe(exchanged.base)
    own = config.get_text_config()
    num_layers = int(own.num_hidden_layers)
    layers = _layers(watched, num_layers)
    if len({(layer.num_heads, layer.num_kv_heads) for layer in layers}) > 1:
        raise RefusedError("its layers have different numbers of heads")
    first = layers[0]
    if first.num_heads % first.num_kv_heads:
        raise RefusedError(f"{first.num_heads} heads are no multiple of its {first.num_kv_heads} KV heads")
    try:
        layer_list(exchanged.base, num_layers)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    fused = _fused(exchanged, watched)
    head = exchanged.head
    # Raises where what comes after the linear layer needs more of the model; it takes the model's base away.
    AroundHead(exchanged.model, exchanged.base_name, exchanged.head_name)
    size = max(max(layer.key_size, layer.value_size) for layer in layers)
    library = LibraryConfig(
        text=text,
        version=library_version(),
        row_multiple=watched.row_multiple,
        weights=tuple(name for name, weight in exchanged.weights.items() if weight.is_used),
        fused=fused,
    )
    return ModelConfig(
        architecture=cls.__name__,
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        intermediate_size=_intermediate_size(own, head.in_features),
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=-(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE,
        rope=NO_ROPE,
        rms_norm_eps=0.0,
        max_position_embeddings=int(own.max_position_embeddings),
        layer_windows=tuple(layer.span.window for layer in layers),
        layer_chunks=tuple(layer.span.attention_chunk for layer in layers),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        library=library,
        **shared,
    )


def _layers(watched: Watched, num_layers: int) -> list[AskedLayer]:
    found = watched.asked.layers
    without = [layer for layer in range(num_layers) if layer not in found]
    if without:
        named = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        raise RefusedError(
            f"{len(without)} of its {num_layers} layers ({named}) do not call the attention interface: state-space "
            "layers, linear attention and caches of their own are not supported"
        )
    if len(found) > num_layers:
        raise RefusedError(f"{len(found)} layers call the attention interface; the config names {num_layers}")
    return [found[layer] for layer in range(num_layers)]


def _fused(exchanged: Exchanged, watched: Watched) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of linear layers that can be computed as one: the model runs with their outputs side by side
    in memory."""
    linears: dict[str, nn.Module] = {name.partition(".")[2]: module for name, module in exchanged.linears.items()}
    groups = fusible(watched, linears)
    prefix = exchanged.base_name
    for group in groups:
        fuse([exchanged.linears[f"{prefix}.{name}"] for name in group])
    try:
        probe(exchanged.base)
    except RefusedError:
        return ()
    return tuple(tuple(f"{prefix}.{name}" for name in group) for group in groups)


def _intermediate_size(config: "PreTrainedConfig", hidden_size: int) -> int:
    size = getattr(config, "intermediate_size", None)
    return size if isinstance(size, int) and size > 0 else 4 * hidden_size


__all__ = ["AttentionSpan", "RefusedError", "library_config"]
