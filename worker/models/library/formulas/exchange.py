"""Exchanges the modules of a model that are known by their formulas, and loads their layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from kernels.backend import Backend
from kernels.elementwise.rope import interleave_rope_pairs
from kernels.kv_cache.write import RopeCacheWrite
from kernels.linear import PackedLinear
from worker.layers.linear import load_linear
from worker.model_config import ModelConfig
from worker.models.library.formulas.gated import Gated, OctavoGatedMLP, find_gated
from worker.models.library.formulas.layer import OctavoLayer, find_norms
from worker.models.library.formulas.norm import OctavoNorm
from worker.models.library.formulas.rotated import (
    OctavoAttention,
    PagedHeads,
    Rotated,
    Rotation,
    find_rotated,
    rotates_by_halves,
)
from worker.models.library.modules import OctavoLinear, product_of
from worker.models.library.parallel import Division, divided
from worker.weights.reader import WeightReader

_Formula = TypeVar("_Formula")


@dataclass(frozen=True, slots=True)
class _Found(Generic[_Formula]):
    """A module that can be exchanged. names: of its linear layers, in the whole model. is_split: ranks divide them;
    otherwise each rank computes all."""

    formula: _Formula
    names: tuple[str, ...]
    is_split: bool


@dataclass(frozen=True, slots=True)
class _Norm:
    """The norm before a layer, which is computed with it. name: in the whole model."""

    name: str | None = None
    eps: float = 0.0


class Formulas:
    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        base: nn.Module,
        linears: Mapping[str, OctavoLinear],
        ways: Mapping[str, Division],
        reader: WeightReader,
    ) -> None:
        """base: its small tensors are loaded, its norms exchanged. linears: its linear layers, which have no weights
        yet. ways: how ranks divide them. Both by names in the whole model."""
        self._config, self._backend, self._base, self._reader = config, backend, base, reader
        # Linear layers that are not exchanged.
        self.others = dict(linears)
        self._ways = ways
        # Prefixes of the names of what is in exchanged modules.
        self._exchanged: list[str] = []
        self.num_bytes = 0
        self._rotary_size = rotates_by_halves(base, config.hidden_size)
        self._rotation = Rotation(config.head_size)

    def exchange(self, name: str, module: nn.Module) -> None:
        """Exchanges a module if it is known by its formula. Call it for a module before its children."""
        if name.startswith(tuple(self._exchanged)):
            return
        exchanged = self._layer(name, module) or self._mlp(name, module) or self._attention(name, module)
        if exchanged is not None:
            parent, _, attribute = name.rpartition(".")
            self._base.get_submodule(parent.partition(".")[2])._modules[attribute] = exchanged
            self._exchanged.append(f"{name}.")
            self.others = {each: linear for each, linear in self.others.items() if not each.startswith(f"{name}.")}

    def _layer(self, name: str, module: nn.Module) -> OctavoLayer | None:
        children = dict(module.named_children())
        norms = {each: child for each, child in children.items() if isinstance(child, OctavoNorm)}
        if len(children) != 4 or len(norms) != 2:
            return None
        gated = {each: self._find_gated(f"{name}.{each}", child) for each, child in children.items()}
        rotated = {each: self._find_rotated(f"{name}.{each}", child) for each, child in children.items()}
        mlp, attention = (next((each for each in found if found[each]), None) for found in (gated, rotated))
        if mlp is None or attention is None:
            return None
        mlp_found, attention_found = gated[mlp], rotated[attention]
        assert mlp_found is not None
        assert attention_found is not None
        is_split = self._backend.shard.size > 1
        if mlp_found.is_split != is_split or attention_found.is_split != is_split:
            return None
        before = find_norms(module, attention, mlp, norms, self._config.hidden_size)
        if before is None or not all(self._is_stored(f"{name}.{each}", norms[each]) for each in before):
            return None
        first, second = (_Norm(f"{name}.{each}", norms[each].eps) for each in before)
        heads, o = self._load_heads(children[attention], attention_found, first)
        return OctavoLayer(module, heads, o, *self._load_mlp(mlp_found, second))

    def _is_stored(self, name: str, norm: OctavoNorm) -> bool:
        """True if a norm multiplies by the numbers that the checkpoint has, and not by 1 more, say."""
        return torch.equal(norm.weight_N, self._reader.float32(f"{name}.weight"))

    # --- MLPs

    def _mlp(self, name: str, module: nn.Module) -> OctavoGatedMLP | None:
        found = self._find_gated(name, module)
        if found is None:
            return None
        first, last = self._load_mlp(found, _Norm())
        dtype = self._backend.compute_dtype
        inner = product_of(first, dtype)
        outer = divided(product_of(last, dtype), Division.INPUTS if found.is_split else Division.WHOLE, None)
        return OctavoGatedMLP(lambda x_TI: outer(inner(x_TI)))

    def _find_gated(self, name: str, module: nn.Module) -> _Found[Gated] | None:
        gated = find_gated(module)
        if gated is None:
            return None
        names = tuple(f"{name}.{each}" for each in (gated.gate, gated.up, gated.down))
        ways = [self._ways[each] for each in names]
        is_split = ways == [Division.OUTPUTS, Division.OUTPUTS, Division.INPUTS]
        if not self._have_bias_alike(names[:2]) or not (is_split or set(ways) == {Division.WHOLE}):
            return None
        return _Found(gated, names, is_split)

    def _load_mlp(self, found: _Found[Gated], norm: _Norm) -> tuple[PackedLinear, PackedLinear]:
        gate, _, down = (self.others[each] for each in found.names)
        part = self._backend.shard.of(gate.out_features, found.names[0]) if found.is_split else None
        first = load_linear(
            self._reader,
            found.names[:2],
            bias=gate.bias is not None,
            backend=self._backend,
            norm=norm.name,
            eps=norm.eps,
            gated=True,
            activation=found.formula.activation,
            outputs=None if part is None else lambda _: part,
        )
        last = load_linear(
            self._reader, found.names[2:], bias=down.bias is not None, backend=self._backend, inputs=part
        )
        self.num_bytes += first.num_bytes + last.num_bytes
        return first, last

    # --- Attention

    def _attention(self, name: str, module: nn.Module) -> OctavoAttention | None:
        found = self._find_rotated(name, module)
        if found is None:
            return None
        heads, o = self._load_heads(module, found, _Norm())
        way = Division.INPUTS if found.is_split else Division.WHOLE
        return OctavoAttention(heads, divided(product_of(o, self._backend.compute_dtype), way, None))

    def _find_rotated(self, name: str, module: nn.Module) -> _Found[Rotated] | None:
        config, shard = self._config, self._backend.shard
        if self._rotary_size is None or not isinstance(getattr(module, "layer_idx", None), int):
            return None
        norms = _norms_of(module)
        rotated = find_rotated(module, config.head_size, self._rotary_size, norms)
        if rotated is None or len({each.eps for each in norms.values()}) > 1:
            return None
        q, k, v, o = names = tuple(f"{name}.{each}" for each in (rotated.q, rotated.k, rotated.v, rotated.o))
        is_split = [self._ways[each] for each in names] == [Division.OUTPUTS] * 3 + [Division.INPUTS]
        widths = [self.others[each].out_features // config.head_size for each in (q, k, v)]
        if not self._have_bias_alike((q, k, v)) or not (is_split or shard.size == 1):
            return None
        if widths != [config.num_heads, config.num_kv_heads, config.num_kv_heads]:
            return None
        return _Found(rotated, (q, k, v, o), is_split)

    def _load_heads(self, module: nn.Module, found: _Found[Rotated], norm: _Norm) -> tuple[PagedHeads, PackedLinear]:
        """Returns the heads, and the layer of what they give."""
        config, backend, reader, rotated = self._config, self._backend, self._reader, found.formula
        q, k, v, o = found.names
        widths = {each: self.others[each].out_features for each in (q, k, v)}
        reorder = partial(interleave_rope_pairs, head_size=config.head_size, rope_size=self._rotary_size)
        qkv = load_linear(
            reader,
            [q, k, v],
            bias=self.others[q].bias is not None,
            backend=backend,
            norm=norm.name,
            eps=norm.eps,
            reorder=lambda each, rows: rows if each == v else reorder(rows),
            outputs=lambda each: backend.shard.of(widths[each], each),
        )
        inputs = backend.shard.of(widths[q], o) if found.is_split else None
        last = load_linear(reader, [o], bias=self.others[o].bias is not None, backend=backend, inputs=inputs)
        self.num_bytes += qkv.num_bytes + last.num_bytes
        num_heads, num_kv_heads = (each // backend.shard.size for each in (config.num_heads, config.num_kv_heads))
        head_norms = [_norms_of(module)[each] for each in rotated.norms]
        head_norm_HD: torch.Tensor | None = None
        if head_norms:
            q_D, k_D = (reorder(each.weight_N) for each in head_norms)
            head_norm_HD = torch.cat((q_D.expand(num_heads, -1), k_D.expand(num_kv_heads, -1)))
        write = RopeCacheWrite(
            backend,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=config.head_size,
            head_norm_HD=head_norm_HD,
            eps=head_norms[0].eps if head_norms else 0.0,
        )
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        return PagedHeads(rotated, layer, config.attention_span_of(layer), self._rotation, qkv, write), last

    def _have_bias_alike(self, names: tuple[str, ...]) -> bool:
        return len({self.others[each].bias is not None for each in names}) == 1


def _norms_of(module: nn.Module) -> dict[str, OctavoNorm]:
    return {name: child for name, child in module.named_children() if isinstance(child, OctavoNorm)}
