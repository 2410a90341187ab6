"""The attention functions that models of transformers call: one computes, one finds out what a model asks.

Legend: T tokens, H heads, K KV heads, D size of a cached head.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.backend import Backend
from kernels.kv_cache.write import RopeCacheWrite
from worker.layers.forward_context import current
from worker.layers.kv_cache import LocalHeads
from worker.model_config import AttentionSpan, ModelConfig
from worker.models.library.classes import RefusedError

# Names in the library's registry of attention functions.
PAGED, ASKED = "octavo", "octavo_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedLayer:
    """The arguments with which one layer calls attention."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    span: AttentionSpan


@dataclass(slots=True)
class Asked:
    """The calls of attention by the layers of a model, by their numbers."""

    layers: dict[int, AskedLayer] = field(default_factory=dict)

    def note(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Raises RefusedError for what paged attention does not compute. s_aux: the library's name of sinks."""
        number = getattr(module, "layer_idx", None)
        what = f"{type(module).__name__} of layer {number}"
        if not isinstance(number, int):
            raise RefusedError(f"{type(module).__name__} does not tell which layer it is (layer_idx)")
        if number in self.layers:
            raise RefusedError(f"{what} calls attention more than once")
        for name in ("sinks", "position_bias", "head_mask"):
            if others.get(name) is not None:
                raise RefusedError(f"{what}: attention with {name} is not computed through this backend")
        if s_aux is not None and s_aux.numel() != query.shape[1]:
            raise RefusedError(f"{what}: s_aux {list(s_aux.shape)} is not one sink for each of {query.shape[1]} heads")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise RefusedError(f"{what}: attention that is not causal, such as cross attention, has no KV cache")
        if query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise RefusedError(
                f"{what}: queries {list(query.shape)} and keys {list(key.shape)} are of different tokens"
            )
        span = _span_of(attention_mask, what)
        if span is None:
            span = AttentionSpan(int(sliding_window or 0), 0)
        elif sliding_window and span != AttentionSpan(int(sliding_window), 0):
            raise RefusedError(f"{what}: sliding_window={sliding_window} contradicts its mask, {span}")
        if others.get("scaling", 1.0) is not None and not isinstance(others.get("scaling", 1.0), float):
            raise RefusedError(f"{what}: its scores have a scale that is not one number")
        self.layers[number] = AskedLayer(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_size=query.shape[3],
            value_size=value.shape[3],
            span=span,
        )


class Mask(torch.Tensor):
    """Stands for a mask while a model is probed. A slice of everything is the same mask."""

    span: AttentionSpan

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.__getitem__ and isinstance(result, Mask) and result.shape == args[0].shape:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if hasattr(args[0], "span") and all(each is ... or isinstance(each, slice) for each in index):
                result.span = args[0].span
        return result


def _span_of(mask: torch.Tensor | None, what: str) -> AttentionSpan | None:
    if mask is None:
        return None
    if not isinstance(mask, Mask) or not hasattr(mask, "span"):
        raise RefusedError(f"{what}: its mask is not one of the library's causal masks")
    return mask.span


# Set while a model is probed.
_asked: Asked | None = None


def asking(asked: Asked | None) -> None:
    """Sets where calls of the probing function are noted."""
    global _asked
    _asked = asked


def ask(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a model that is probed."""
    assert _asked is not None
    _asked.note(module, query, key, value, attention_mask, **others)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def mask_of(*, q_length: int, kv_length: int, mask_function: Any, **others: Any) -> torch.Tensor:
    """The mask function of a model that is probed: finds a span with the same mask."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(Mask)
    span = find_span(mask_function)
    if span is not None:
        mask.span = span
    return mask


# A mask is compared with spans at these positions, and with windows and chunks up to the last one.
_FAR = 1 << 20


def find_span(mask_function: Any) -> AttentionSpan | None:
    """Returns the span whose mask is that of mask_function(batch, head, query, key), or None."""

    def sees(query: int, key: int) -> bool:
        place = torch.tensor(0)
        return bool(mask_function(place, place, torch.tensor(query), torch.tensor(key)))

    # The first key that the query sees tells a window or a chunk. Within both, visible keys are one run.
    def first_seen(query: int) -> int:
        return bisect_left(range(query), True, key=lambda key: sees(query, key))

    if first_seen(_FAR) == 0:
        found = AttentionSpan()
    elif first_seen(_FAR) == first_seen(_FAR + 1) - 1 and first_seen(_FAR + 1) == first_seen(_FAR + 2) - 1:
        found = AttentionSpan(_FAR - first_seen(_FAR) + 1, 0)
    else:
        found = AttentionSpan(0, bisect_left(range(_FAR + 1), True, key=lambda query: not sees(query, 0)))
    edges = {0, 1, 2, 5, _FAR - 1, _FAR}
    for size in (found.window, found.attention_chunk):
        edges |= {max(0, size + near) for near in (-2, -1, 0, 1, 2)} | {2 * size, 2 * size + 1}
    places = sorted(edges)
    agrees = all(sees(query, key) == _visible(found, query, key) for query in places for key in places)
    return found if agrees else None


def _visible(span: AttentionSpan, query: int, key: int) -> bool:
    if key > query or (span.window and key <= query - span.window):
        return False
    return not span.attention_chunk or query // span.attention_chunk == key // span.attention_chunk


class PagedAttention:
    """Writes a step's keys and values to the KV cache, and attends over it. Heads are padded with zeros to the cache's
    head size, which changes no score and no sum."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self._spans = [config.attention_span_of(layer) for layer in range(config.num_layers)]
        self._size = config.head_size
        self._local = LocalHeads(config, backend.shard)
        shape = self._local.shape
        self._num_heads, self._num_kv_heads = shape.num_heads, shape.num_kv_heads
        self._dtype = backend.compute_dtype
        # Rope is the library's: this one rotates by 0, and there are no queries for it.
        self._write = RopeCacheWrite(backend, num_heads=0, num_kv_heads=shape.num_kv_heads, head_size=config.head_size)
        self._no_rotation = torch.empty(0)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, H, T, any], key and value [1, K, T, any], sinks [H]: of this rank's heads, or of all. Returns
        [1, T, H, any]. Tokens beyond those of the step are padding, and get zeros."""
        context, is_whole = current(), query.shape[1] != self._num_heads
        if is_whole:
            # The library's plan leaves attention to every rank; the KV cache is divided all the same.
            query = query[:, self._local.heads]
            key, value = key[:, self._local.kv_heads], value[:, self._local.kv_heads]
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        num_tokens, size = context.slots_T.shape[0], self._size
        take, cache = context.workspace.take, context.kv_cache.of_layer(layer)
        kv_T2KD = take("library kv", num_tokens, 2, self._num_kv_heads, size)
        torch.stack((self._heads_of(key, num_tokens), self._heads_of(value, num_tokens)), dim=1, out=kv_T2KD)
        self._write(kv_T2KD.view(num_tokens, -1), self._unrotated(num_tokens), cache, context.slots_T)
        q_THD = self._heads_of(query, num_tokens).to(self._dtype)
        if q_THD.stride()[1:] != (size, 1):
            q_THD = q_THD.contiguous()
        if sinks is not None:
            sinks = sinks.flatten().float()
            sinks = (sinks if len(sinks) == self._num_heads else sinks[self._local.heads]).contiguous()
        o_THD = context.attention_plans[self._spans[layer]].attend(
            q_THD,
            cache,
            query.shape[3] ** -0.5 if scaling is None else scaling,
            out=take("heads", num_tokens, self._num_heads, size),
            soft_cap=soft_cap,
            sinks_H=sinks,
        )
        if value.shape[3] != size:
            o_THD = o_THD[:, :, : value.shape[3]].contiguous()
        if is_whole:
            o_THD = context.group.gather(o_THD).transpose(0, 1).flatten(1, 2)
        padding = query.shape[2] - num_tokens
        if padding:
            o_THD = functional.pad(o_THD, (0, 0, 0, 0, 0, padding))
        return o_THD.float()[None]

    def _heads_of(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns the tokens of the step, [T, heads, D], of a tensor [1, heads, at least T, at most D]."""
        x_THD = x[0].transpose(0, 1)
        if x_THD.shape[0] != num_tokens:
            x_THD = x_THD[:num_tokens]
        missing = self._size - x_THD.shape[2]
        return functional.pad(x_THD, (0, missing)) if missing else x_THD

    def _unrotated(self, num_tokens: int) -> torch.Tensor:
        if self._no_rotation.shape[0] < num_tokens:
            self._no_rotation = torch.ones(2 * num_tokens, 1, self._size // 2, dtype=torch.complex64)
        return self._no_rotation[:num_tokens]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a model that computes. Its other arguments were checked when the model was probed."""
    o = module.octavo_attention(  # pyright: ignore[reportCallIssue]
        module, query, key, value, scaling=scaling, soft_cap=softcap or 0.0, sinks=s_aux
    )
    return o, None


def register() -> None:
    """Enters both functions into the library's registries; more than once does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, attend)
    AttentionInterface.register(ASKED, ask)
    AttentionMaskInterface.register(ASKED, mask_of)
