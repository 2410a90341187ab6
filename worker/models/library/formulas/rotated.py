"""Attention of the library between fused linear layers: rope, the write into the KV cache and paged attention.

Legend: T tokens of the step, R rows with padding, E hidden size, H heads, K KV heads, D head size, P pairs of a head,
F = (H + 2 K) * D.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.kv_cache.write import RopeCacheWrite
from kernels.linear import PackedLinear
from worker.layers.forward_context import current
from worker.model_config import AttentionSpan
from worker.models.library.formulas.norm import OctavoNorm, is_same
from worker.models.library.modules import OctavoLinear, Product

_NUM_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """The names of an attention module's layers within it, and what it asks of attention."""

    q: str
    k: str
    v: str
    o: str
    # Norms of each head of q and of k; empty: there are none.
    norms: tuple[str, ...]
    is_rotated: bool
    scale: float
    soft_cap: float


class Rotation:
    """Cosines and sines of a step, from the library's form into that of RopeCacheWrite. All layers share one."""

    def __init__(self, head_size: int) -> None:
        self._num_pairs = head_size // 2
        self._given: torch.Tensor | None = None
        self._table = self._none = self._ones(0)

    def none(self, num_tokens: int) -> torch.Tensor:
        """Returns the table of a rotation by 0, complex64 [T, 1, P]."""
        if len(self._none) < num_tokens:
            self._none = self._ones(2 * num_tokens)
        return self._none[:num_tokens]

    def _ones(self, num_tokens: int) -> torch.Tensor:
        return torch.ones(num_tokens, 1, self._num_pairs, dtype=torch.complex64)

    def __call__(self, cos: torch.Tensor, sin: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """cos, sin: float32 [1, R, at most D], each half the same numbers. Returns complex64 [T, 1, P]."""
        # All layers of a step get the same tensor.
        if cos is not self._given:
            half = cos.shape[-1] // 2
            table = self._ones(num_tokens)
            table[:, 0, :half] = torch.complex(cos[0, :num_tokens, :half], sin[0, :num_tokens, :half])
            self._given, self._table = cos, table
        return self._table


def rotates_by_halves(base: nn.Module, hidden_size: int) -> int | None:
    """Returns how many numbers of a head a model rotates, if its rotary embeddings have the form that Rotation takes:
    one cosine and one sine for each pair, both halves the same. None if it has another form, or several."""
    rotary = getattr(base, "rotary_emb", None)
    positions = torch.arange(_NUM_TOKENS)[None] * 7
    try:
        cos, sin = rotary(torch.zeros(1, _NUM_TOKENS, hidden_size), positions)  # pyright: ignore[reportOptionalCall]
    except Exception:  # noqa: BLE001 - a model without one, or one that takes other inputs, may raise anything
        return None
    for each in (cos, sin):
        if each.dtype is not torch.float32 or each.dim() != 3 or each.shape[-1] % 2:
            return None
        first, second = each.chunk(2, dim=-1)
        if not torch.equal(first, second):
            return None
    return cos.shape[-1]


@dataclass(slots=True)
class _Seen:
    """The inputs of an attention module's layers and of the attention function, for made up numbers."""

    # By the names of layers, in the order of their calls.
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    # Queries, keys and values: [heads, T, any].
    heads: Sequence[torch.Tensor] = ()
    # The layer after attention.
    last: str = ""
    scale: float = 0.0
    soft_cap: float = 0.0
    # Made up as well.
    attended: torch.Tensor | None = None
    has_others: bool = False

    def attend(
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
        """Stands for PagedAttention."""
        self.has_others = self.attended is not None or sinks is not None
        self.heads = (query[0], key[0], value[0])
        self.scale, self.soft_cap = query.shape[3] ** -0.5 if scaling is None else scaling, soft_cap
        num_heads, num_tokens, size = query[0].shape
        generator = torch.Generator().manual_seed(1)
        self.attended = torch.randn(1, num_tokens, num_heads, size, generator=generator)
        return self.attended


def find_rotated(
    module: nn.Module, head_size: int, rotary_size: int, norms: Mapping[str, OctavoNorm]
) -> Rotated | None:
    """Returns the layers of an attention module whose linear layers are exchanged and have no weights yet; None if it
    computes something else than Rotated says. rotary_size: see rotates_by_halves. norms: those that its children
    compute, by name."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, OctavoLinear)}
    others = [name for name, _ in module.named_children() if name not in layers]
    if len(layers) != 4 or set(others) != set(norms) or len(norms) not in (0, 2):
        return None
    if list(inspect.signature(module.forward).parameters)[:2] != ["hidden_states", "position_embeddings"]:
        return None
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(_NUM_TOKENS, each.out_features, generator=generator) * 3 for name, each in layers.items()}
    angles = torch.rand(1, _NUM_TOKENS, rotary_size // 2, generator=generator).mul_(6).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    seen = _run(module, layers, made, (cos, sin), generator)
    if seen is None:
        return None
    o = seen.last
    if any(each.shape[2] != head_size for each in seen.heads):
        return None
    inner = [name for name in layers if name != o]
    ways = itertools.product(itertools.permutations(inner), (True, False), itertools.permutations(norms))
    for (q, k, v), is_rotated, order in ways:
        heads = [_heads_of(made[name], head_size) for name in (q, k, v)]
        for i, name in enumerate(order):
            heads[i] = norms[name](heads[i])
        if is_rotated:
            heads[:2] = [_rotate(each, cos, sin) for each in heads[:2]]
        if all(map(is_same, seen.heads, heads)):
            return Rotated(
                q=q, k=k, v=v, o=o, norms=order, is_rotated=is_rotated, scale=seen.scale, soft_cap=seen.soft_cap
            )
    return None


def _run(
    module: nn.Module,
    layers: Mapping[str, OctavoLinear],
    made: Mapping[str, torch.Tensor],
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    generator: torch.Generator,
) -> _Seen | None:
    """Runs a module with made up results of its layers. Returns None if it does not run, or gives something else than
    the result of the layer that gets what attention gives."""
    seen = _Seen()

    def give(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.inputs[name] = x
        return made[name]

    size = next(iter(layers.values())).in_features
    x = torch.randn(1, _NUM_TOKENS, size, generator=generator)
    try:
        for name, layer in layers.items():
            layer.octavo.product = partial(give, name)
        module.__dict__["octavo_attention"] = seen.attend
        result = module(x, position_embeddings=cos_sin, attention_mask=None)
    except Exception:  # noqa: BLE001 - a module that takes other inputs may raise anything
        return None
    finally:
        module.__dict__.pop("octavo_attention", None)
        for layer in layers.values():
            layer.octavo.product = None
    if seen.attended is None or seen.has_others or seen.inputs.keys() != layers.keys():
        return None
    # The library calls it last.
    *inner, seen.last = seen.inputs
    if not torch.equal(seen.inputs[seen.last], seen.attended.flatten(2)[0]):
        return None
    if not isinstance(result, tuple) or len(result) != 2 or not torch.equal(result[0], made[seen.last][None]):
        return None
    return seen if all(torch.equal(seen.inputs[name], x[0]) for name in inner) else None


def _heads_of(made_TO: torch.Tensor, head_size: int) -> torch.Tensor:
    """Returns [heads, T, D]; no heads if the width is no multiple of a head's."""
    if made_TO.shape[1] % head_size:
        return made_TO.new_empty(0, len(made_TO), head_size)
    return made_TO.unflatten(1, (-1, head_size)).transpose(0, 1)


def _rotate(x_HTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary, rest = x_HTD[..., : cos.shape[-1]], x_HTD[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat((rotary * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


class PagedHeads:
    """The outputs of a layer's heads: a product for q, k and v, rope, the write into the KV cache, paged attention."""

    def __init__(
        self,
        rotated: Rotated,
        layer: int,
        span: AttentionSpan,
        rotation: Rotation,
        qkv: PackedLinear,
        write: RopeCacheWrite,
    ) -> None:
        """qkv: its outputs are as `write` takes them; it may have a norm."""
        self._layer, self._span, self._rotation, self._qkv, self._write = layer, span, rotation, qkv, write
        self._is_rotated, self._scale, self._soft_cap = rotated.is_rotated, rotated.scale, rotated.soft_cap

    def __call__(self, x_TE: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x_TE: contiguous. position_embeddings: the library's cosines and sines. Returns [T, H * D]."""
        context, num_tokens = current(), len(x_TE)
        take, cache = context.workspace.take, context.kv_cache.of_layer(self._layer)
        qkv_TF = self._qkv(x_TE, out=take("qkv", num_tokens, self._qkv.num_outputs))
        cos, sin = position_embeddings
        table = self._rotation(cos, sin, num_tokens) if self._is_rotated else self._rotation.none(num_tokens)
        q_THD = self._write(qkv_TF, table, cache, context.slots_T)
        o_THD = context.attention_plans[self._span].attend(
            q_THD, cache, self._scale, out=take("heads", *q_THD.shape), soft_cap=self._soft_cap
        )
        return o_THD.view(num_tokens, -1)


class OctavoAttention(nn.Module):
    def __init__(self, heads: PagedHeads, o: Product) -> None:
        """o: the product of what the heads give."""
        super().__init__()
        self._heads, self._o = heads, o

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, R, E]. Rows of padding get zeros."""
        num_rows, size = hidden_states.shape[1:]
        x_TE = hidden_states.reshape(num_rows, size).contiguous()
        padding = num_rows - len(current().slots_T)
        if padding:
            x_TE = x_TE[:-padding]
        y_TE = self._o(self._heads(x_TE, position_embeddings))
        if padding:
            y_TE = functional.pad(y_TE, (0, 0, 0, padding))
        return y_TE.view(1, num_rows, -1), None

    # nn.Module's own call looks for hooks, which there are none of.
    __call__ = forward
