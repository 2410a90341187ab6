"""Grouped-query attention: norm, projections, head norms, rope, the KV cache.

Legend: T tokens, H heads, D head size, E hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.backend import Backend
from kernels.elementwise.rope import interleave_rope_pairs
from kernels.elementwise.silu_mul import multiply_by_sigmoid_
from kernels.kv_cache.layout import KVScales
from kernels.kv_cache.write import RopeCacheWrite
from kernels.linear import PackedLinear, Stream
from worker.layers.forward_context import Workspace, current
from worker.layers.kv_cache import LocalHeads
from worker.layers.linear import linear_shapes, load_linear
from worker.layers.norm import Norm
from worker.layers.residual import InputNorm, Layer, LayerInput, LayerOutput, nothing, stream_for
from worker.model_config import ModelConfig
from worker.weights.reader import Shape, WeightReader


class QueryTemperature:
    """Factors for the queries of a step; worker.model_config.TemperatureConfig has the formula."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        self._config = config.query_temperature
        if self._config is not None:
            # A table, because a logarithm may round differently at another position in a tensor.
            steps = torch.arange(config.longest_context // self._config.floor_scale + 1, dtype=torch.float32)
            self._table = (1 + self._config.scale * torch.log1p(steps)).to(backend.device)

    def __call__(self, positions_T: torch.Tensor, workspace: Workspace) -> torch.Tensor | None:
        """Returns float32 [T], in the workspace, or None if no layer has a temperature. positions_T: below
        the config's longest_context."""
        if self._config is None:
            return None
        steps_T = (positions_T + 1).div_(self._config.floor_scale, rounding_mode="floor")
        out_T = workspace.take("query temperature", len(positions_T), dtype=torch.float32)
        return torch.index_select(self._table, 0, steps_T, out=out_T)


def heat_(q_THD: torch.Tensor, temperature_T: torch.Tensor) -> None:
    """Multiplies each token's queries by its temperature, in place."""
    q_THD.mul_(temperature_T[:, None, None])


class ProjectionNorm:
    """RMS norm over all heads of q, or of k, together. Ranks that split the heads gather them first."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        reader: WeightReader,
        backend: Backend,
        reorder: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        """name: the norm's tensor, such as model.layers.3.self_attn.q_norm."""
        shard = backend.shard
        kind = name.removesuffix("_norm")[-1]
        ranks = [LocalHeads(config, replace(shard, rank=rank)) for rank in range(shard.size)]
        rows = [local.rows_of(kind) for local in ranks]
        own = ranks[shard.rank]
        width, first = rows[0].stop - rows[0].start, own.rows_of("q").stop - own.rows_of("q").start
        self._columns = slice(0, width) if kind == "q" else slice(first, first + width)
        # If several ranks hold the same heads, each head occurs equally often, so the mean does not change.
        self._own = slice(shard.rank * width, (shard.rank + 1) * width)
        self._buffer = f"normed {kind}"

        def of_all_ranks(name: str, numbers: torch.Tensor) -> torch.Tensor:
            numbers = reorder(name, numbers)
            return torch.cat([numbers[part] for part in rows])

        self._norm = Norm(name, config.rms_norm_eps, reader, backend, reorder=of_all_ranks)

    def norm_(self, qkv_TF: torch.Tensor) -> None:
        """Norms this projection's columns, in place."""
        context = current()
        x_TN = qkv_TF[:, self._columns]
        whole_TN = x_TN
        if context.group.size > 1:
            whole_TN = context.group.gather(x_TN.contiguous()).transpose(0, 1).flatten(1)
        normed_TN = self._norm(whole_TN, out=context.workspace.take(self._buffer, *whole_TN.shape))
        x_TN.copy_(normed_TN[:, self._own])


class Attention(Layer):
    """One layer's attention. prefix: of its tensors, such as model.layers.3.self_attn. norm: the one that its input
    comes from; None: there is none before attention."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        prefix: str,
        norm: InputNorm | None,
        reader: WeightReader,
        backend: Backend,
    ) -> None:
        self._layer, self._norm, self._kernels = layer, norm, backend.native
        self._span, self._rope = config.attention_span_of(layer), config.rope_of(layer)
        self._scale, self.softcap = config.attention_scale, config.attention_soft_cap
        self._has_temperature = config.has_temperature(layer)
        eps, norm_name = config.rms_norm_eps, None if norm is None else norm.name

        def heads(name: str, rows: torch.Tensor) -> torch.Tensor:
            if config.attention_gate and name.endswith("q_proj"):
                rows = _halves(rows, config.head_size)[0]
            if backend.gpu is not None or config.interleaved_rope or name.endswith("v_proj"):
                return rows
            return interleave_rope_pairs(rows, config.head_size, config.rope_size)

        local = LocalHeads(config, backend.shard)
        names = {f"{prefix}.{kind}_proj": local.rows_of(kind) for kind in "qkv"}
        # Gates of the result, before the output projection; None: there are none.
        self._gate: PackedLinear | None = None
        if config.attention_gate:
            both = slice(2 * local.rows_of("q").start, 2 * local.rows_of("q").stop)
            names[f"{prefix}.q_proj"] = both
            self._gate = load_linear(
                reader,
                [f"{prefix}.q_proj"],
                bias=config.qkv_bias,
                backend=backend,
                norm=norm_name,
                eps=eps,
                reorder=lambda name, rows: _halves(rows, config.head_size)[1],
                outputs=lambda name: both,
            )
        self._qkv = load_linear(
            reader,
            [*names],
            bias=config.qkv_bias,
            backend=backend,
            norm=norm_name,
            eps=eps,
            reorder=heads,
            outputs=names.__getitem__,
        )
        self._o = load_linear(
            reader, [f"{prefix}.o_proj"], bias=config.attention_output_bias, backend=backend, inputs=local.rows_of("q")
        )
        self._kv_scales = kv_scales_of(reader, prefix, backend)
        # Scores that join each head's softmax without a value; None: there are none.
        self.sinks_H: torch.Tensor | None = None
        if config.has_sinks:
            self.sinks_H = reader.float32(f"{prefix}.sinks")[local.heads].contiguous().to(backend.device)
        self._projection_norms: list[ProjectionNorm] = []
        if config.projection_norm:
            self._projection_norms = [
                ProjectionNorm(config, f"{prefix}.{kind}_norm", reader, backend, heads) for kind in "qk"
            ]
        head_norm_HD: torch.Tensor | None = None
        if config.qk_norm:
            q_D, k_D = (heads(kind, reader(f"{prefix}.{kind}_norm.weight").float()) for kind in "qk")
            shape = local.shape
            head_norm_HD = torch.cat((q_D.expand(shape.num_heads, -1), k_D.expand(shape.num_kv_heads, -1)))
        elif config.norms_rotated_heads and config.has_rope(layer):
            # The model norms heads after rope; doing it before is the same, since rope keeps a head's length.
            head_norm_HD = torch.ones(local.shape.num_heads + local.shape.num_kv_heads, config.head_size)
        self._rope_cache_write = RopeCacheWrite(
            backend,
            num_heads=local.shape.num_heads,
            num_kv_heads=local.shape.num_kv_heads,
            head_size=config.head_size,
            head_norm_HD=head_norm_HD,
            eps=eps,
            kv_scales=self._kv_scales,
            interleaved=config.interleaved_rope,
        )

    @staticmethod
    def shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
        """Returns the shapes of the tensors under the prefix, by name."""
        hidden, q, kv = config.hidden_size, config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        linears = {
            "q_proj": (hidden, 2 * q if config.attention_gate else q),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (q, hidden),
        }
        bias = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()
        shapes = linear_shapes(prefix, linears, bias=(*bias, "o_proj") if config.attention_output_bias else bias)
        if config.qk_norm:
            shapes |= {f"{prefix}.{kind}_norm.weight": (config.head_size,) for kind in "qk"}
        elif config.projection_norm:
            shapes |= {f"{prefix}.q_norm.weight": (q,), f"{prefix}.k_norm.weight": (kv,)}
        if config.has_sinks:
            shapes[f"{prefix}.sinks"] = (config.num_heads,)
        return shapes

    @property
    def weight_bytes(self) -> int:
        return sum(linear.num_bytes for linear in (self._qkv, self._o, self._gate) if linear is not None)

    def __call__(self, h: LayerInput, /) -> LayerOutput:
        """Returns attention over the input, and writes the tokens' KV to the cache."""
        wanted = None if isinstance(h, torch.Tensor) else h.wanted
        if not len(h):
            return nothing(wanted)
        context, num_tokens = current(), len(h)
        inputs = stream_for(h, self._norm)
        q_THD = self._queries(inputs, num_tokens)
        if wanted is not None:
            assert self._gate is None, "gates are computed for all tokens"
            wanted.go_on()
            if not len(wanted):
                return nothing(wanted)
        o_TF = context.between_graphs(partial(self._attend, q_THD)).flatten(1)
        if wanted is not None:
            o_TF = wanted.of("wanted heads", o_TF, context.workspace.take)
        if self._gate is not None:
            gates_TF = self._gate(inputs, out=context.workspace.take("gates", num_tokens, self._gate.num_outputs))
            multiply_by_sigmoid_(o_TF, gates_TF, self._kernels)
        return LayerOutput(lambda into_TE: self._o.add_to_(into_TE, o_TF), wanted=wanted)

    def _queries(self, inputs: Stream, num_tokens: int) -> torch.Tensor:
        """Projects q, k and v, and writes the tokens' KV. Returns q_THD."""
        context = current()
        cache, take = context.kv_cache.of_layer(self._layer), context.workspace.take
        qkv_TF = self._qkv(inputs, out=take("qkv", num_tokens, self._qkv.num_outputs))
        for norm in self._projection_norms:
            norm.norm_(qkv_TF)
        q_THD = self._rope_cache_write(qkv_TF, context.cos_sin_tables[self._rope], cache, context.slots_T)
        if self._has_temperature:
            assert context.query_temperature_T is not None
            heat_(q_THD, context.query_temperature_T)
        return q_THD

    def _attend(self, q_THD: torch.Tensor) -> torch.Tensor:
        context = current()
        return context.attention_plans[self._span].attend(
            q_THD,
            context.kv_cache.of_layer(self._layer),
            self._scale,
            out=context.workspace.take("heads", *q_THD.shape),
            kv_scales=self._kv_scales,
            soft_cap=self.softcap,
            sinks_H=self.sinks_H,
        )


def _halves(rows: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the query projection's outputs, and those for gates, which it has beside each head."""
    queries, gates = rows.unflatten(0, (-1, 2, head_size)).unbind(1)
    return queries.flatten(0, 1), gates.flatten(0, 1)


def kv_scales_of(reader: WeightReader, prefix: str, backend: Backend) -> KVScales | None:
    """Returns the layer's KV scales, or None if the cache is not e4m3. prefix: of the attention's tensors."""
    if backend.kv_cache_dtype is not torch.float8_e4m3fn:
        return None
    k, v = reader.kv_scale(prefix) or (1.0, 1.0)
    return KVScales(torch.tensor([k], device=backend.device), torch.tensor([v], device=backend.device))
