"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds, per token, a latent and one key part rotated by rope. Keys and values of all heads are linear functions
of the latent. These functions are absorbed (appendix C there): q . (K latent) = (K^T q) . latent, and a sum of values
is V of the sum of latents. So attention uses the cached latents directly, and all heads read the same ones.

Legend: T tokens, E hidden size, H heads of this rank, N numbers of a head that rope does not rotate, R numbers that it
does, L latent size, V value size, F outputs of the first projections.
"""

from functools import partial

import torch

from kernels.backend import Backend
from kernels.elementwise.rope import interleave_rope_pairs
from kernels.kv_cache.latent_write import RopeLatentWrite
from worker.layers.attention import kv_scales_of
from worker.layers.forward_context import current
from worker.layers.linear import HeadLinears, linear_shapes, load_linear
from worker.layers.norm import Norm
from worker.layers.residual import InputNorm, Layer, LayerInput, LayerOutput, nothing, stream_for
from worker.model_config import AttentionSpan, LatentConfig, ModelConfig
from worker.weights.reader import Shape, WeightReader

# The epsilon of the latents' norms, in DeepSeek's own code and in transformers, whatever rms_norm_eps the config has.
_EPS = 1e-6


class LatentAttention(Layer):
    """One layer's attention. prefix: of its tensors, such as model.layers.3.self_attn. norm: the one that its input
    comes from. Each rank has a part of the heads, and all of the projections that give latents."""

    def __init__(
        self, config: ModelConfig, layer: int, prefix: str, norm: InputNorm, reader: WeightReader, backend: Backend
    ) -> None:
        latent = config.latent
        assert latent is not None
        self._layer, self._latent, self._norm = layer, latent, norm
        heads = backend.shard.of(config.num_heads, "num_attention_heads")
        self._num_heads = heads.stop - heads.start
        queries = slice(heads.start * latent.head_size, heads.stop * latent.head_size)
        values = slice(heads.start * latent.value_size, heads.stop * latent.value_size)
        ordered = partial(_ordered, latent) if backend.gpu is None and not latent.interleaved else _as_it_is
        first = {"q_proj": queries} if latent.query_rank is None else {"q_a_proj": slice(0, latent.query_rank)}
        first["kv_a_proj_with_mqa"] = slice(0, latent.entry_size)
        parts = {f"{prefix}.{name}": part for name, part in first.items()}
        self._first = load_linear(
            reader,
            [*parts],
            bias=False,
            backend=backend,
            norm=norm.name,
            eps=config.rms_norm_eps,
            reorder=ordered,
            outputs=parts.__getitem__,
        )
        self._query_norm = self._query = None
        if latent.query_rank is not None:
            self._query_norm = Norm(f"{prefix}.q_a_layernorm", _EPS, reader, backend)
            self._query = load_linear(
                reader,
                [f"{prefix}.q_b_proj"],
                bias=False,
                backend=backend,
                reorder=ordered,
                outputs=lambda name: queries,
            )
        self._latent_norm = Norm(f"{prefix}.kv_a_layernorm", _EPS, reader, backend)
        # As floats: the absorbed weights are not multiplied in their stored (quantized) form.
        up_HL = reader(f"{prefix}.kv_b_proj.weight").unflatten(0, (config.num_heads, -1))[heads]
        keys_HNL, values_HVL = up_HL.split([latent.nope_size, latent.value_size], dim=1)
        self._absorbed_keys = HeadLinears(keys_HNL.transpose(1, 2), backend)
        self._values = HeadLinears(values_HVL, backend)
        self._o = load_linear(reader, [f"{prefix}.o_proj"], bias=False, backend=backend, inputs=values)
        self._kv_scales = kv_scales_of(reader, prefix, backend)
        self._rope_write = RopeLatentWrite(
            backend,
            interleaved=backend.gpu is None or latent.interleaved,
            kv_scale=None if self._kv_scales is None else self._kv_scales.k,
        )

    @staticmethod
    def shapes(config: ModelConfig, prefix: str) -> dict[str, Shape]:
        """Returns the shapes of the tensors under the prefix, by name."""
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None
        queries, values = config.num_heads * latent.head_size, config.num_heads * latent.value_size
        linears = {
            "kv_a_proj_with_mqa": (hidden, latent.entry_size),
            "kv_b_proj": (latent.latent_size, config.num_heads * latent.nope_size + values),
            "o_proj": (values, hidden),
        }
        norms = {"kv_a_layernorm": latent.latent_size}
        if latent.query_rank is None:
            linears["q_proj"] = (hidden, queries)
        else:
            linears |= {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, queries)}
            norms["q_a_layernorm"] = latent.query_rank
        return linear_shapes(prefix, linears) | {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}

    @property
    def weight_bytes(self) -> int:
        linears = (self._first, self._query, self._absorbed_keys, self._values, self._o)
        return sum(linear.num_bytes for linear in linears if linear is not None)

    def __call__(self, h: LayerInput, /) -> LayerOutput:
        """Returns attention over the input, and writes the tokens' latents to the cache."""
        context, latent, num_tokens = current(), self._latent, len(h)
        if not num_tokens:
            return nothing()
        take, inputs = context.workspace.take, stream_for(h, self._norm)
        first_TF = self._first(inputs, out=take("latents", num_tokens, self._first.num_outputs))
        latent_TL, k_TR = first_TF[:, -latent.entry_size :].split([latent.latent_size, latent.rope_size], dim=1)
        latent_TL = self._latent_norm(latent_TL, out=take("normed latents", num_tokens, latent.latent_size))
        q_nope_THN, q_rope_THR = self._queries(first_TF).split([latent.nope_size, latent.rope_size], dim=2)
        cache = context.kv_cache.of_layer(self._layer)
        self._rope_write(q_rope_THR, latent_TL, k_TR, context.cos_sin_tables[0], cache, context.slots_T)

        q_THE = take("absorbed queries", num_tokens, self._num_heads, latent.entry_size)
        self._absorbed_keys(q_nope_THN, q_THE[:, :, : latent.latent_size])
        q_THE[:, :, latent.latent_size :] = q_rope_THR
        o_THL = context.between_graphs(partial(self._attend, q_THE))
        o_THV = take("heads", num_tokens, self._num_heads, latent.value_size)
        self._values(o_THL, o_THV)
        return LayerOutput(lambda into_TE: self._o.add_to_(into_TE, o_THV.flatten(1)))

    def _queries(self, first_TF: torch.Tensor) -> torch.Tensor:
        """Returns [T, H, N + R]."""
        latent, take = self._latent, current().workspace.take
        q_TF = first_TF[:, : -latent.entry_size]
        if self._query is not None:
            assert self._query_norm is not None
            normed_TF = self._query_norm(q_TF, out=take("normed query latents", *q_TF.shape))
            q_TF = self._query(normed_TF, out=take("queries", len(q_TF), self._query.num_outputs))
        return q_TF.unflatten(1, (self._num_heads, latent.head_size))

    def _attend(self, q_THE: torch.Tensor) -> torch.Tensor:
        context, latent = current(), self._latent
        return context.attention_plans[AttentionSpan()].attend(
            q_THE,
            context.kv_cache.of_layer(self._layer),
            latent.scale,
            out=context.workspace.take("sums of latents", *q_THE.shape[:2], latent.latent_size),
            kv_scales=self._kv_scales,
        )


def _as_it_is(name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows


def _ordered(latent: LatentConfig, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Puts the pairs that rope rotates side by side, in each query head and in the one key."""
    if name.endswith("q_a_proj"):
        return rows
    heads = rows.unflatten(0, (-1, latent.entry_size if name.endswith("kv_a_proj_with_mqa") else latent.head_size))
    turned = heads[:, -latent.rope_size :]
    heads = heads.clone()
    heads[:, -latent.rope_size :] = interleave_rope_pairs(turned.flatten(0, 1), latent.rope_size).view_as(turned)
    return heads.flatten(0, 1)
