"""Paged attention for TPUs, in JAX's Pallas: `pip install octavo[tpu]`. No worker calls it yet.

A program attends with a tile of one row's queries, of all the query heads of one KV head, to one page of the row's KV;
the pages of a tile come one after the other. Where a page lies is read from the block table before the page is copied
from HBM, while the one before it is computed. Sums are those of FlashAttention, in float32 in on-chip memory.

A page is a block of `kernels.kv_cache.layout`, [2, K, B, D], with as many tokens as octavo.plan.machine.tpu_pages says.
"""

from functools import partial

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax.experimental import pallas as pl  # pyright: ignore[reportMissingImports]
from jax.experimental.pallas import tpu as pltpu  # pyright: ignore[reportMissingImports]

# Queries of a row in a tile. With a group of 4 heads and 128 numbers a head, a tile has 256 KiB of float32.
_MOST_QUERIES = 128
_MASKED = -1e30


@partial(jax.jit, static_argnames=("max_query_len", "scale", "window", "attention_chunk", "soft_cap", "interpret"))
def paged_attention(
    q_THD: "jax.Array",
    cache_N2KBD: "jax.Array",
    *,
    query_starts: "jax.Array",
    context_lens: "jax.Array",
    block_tables: "jax.Array",
    max_query_len: int,
    scale: float,
    window: int = 0,
    attention_chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: "jax.Array | None" = None,
    interpret: bool = False,
) -> "jax.Array":
    """Computes causal attention of each row's queries, its last tokens, to its context. Returns [T, H, D] as q.

    T tokens of R rows, H heads, D head size, N pages of B tokens for K KV heads, P pages a row.

    query_starts: int32 [R + 1], ascending; the rows' queries. context_lens: int32 [R], tokens of each row, its queries
    included; 0: the row is padding, and gets zeros. block_tables: int32 [R, P]; entries behind a row's context may name
    any page. max_query_len: of any row. window, attention_chunk, soft_cap, sinks [H]: as in
    kernels.attention.paged.reference. interpret: compute without a TPU.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    _, _, num_kv_heads, page_size, _ = cache_N2KBD.shape
    num_rows, num_pages = block_tables.shape
    group = num_heads // num_kv_heads
    tile = min(_MOST_QUERIES, 1 << (max_query_len - 1).bit_length())
    num_tiles = -(-max_query_len // tile)
    # [R, Q]: the token of each row's query, or one behind the last for padding.
    places_RQ = query_starts[:-1, None] + jnp.arange(num_tiles * tile)[None]
    is_query_RQ = places_RQ < query_starts[1:, None]
    padded_THD = jnp.concatenate((q_THD, jnp.zeros_like(q_THD[:1])))
    q_RQKGD = padded_THD[jnp.where(is_query_RQ, places_RQ, num_tokens)].reshape(
        num_rows, -1, num_kv_heads, group, head_size
    )
    # Queries of a group lie side by side: row of a tile = query * group + head.
    q_RKMD = q_RQKGD.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, -1, head_size)
    if sinks is None:
        sinks_KM = jnp.full((num_kv_heads, 1, tile * group), _MASKED, jnp.float32)
    else:
        sinks_KM = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, 1, group), (1, 1, tile))
    out_RKMD = pl.pallas_call(
        partial(
            _kernel,
            page_size=page_size,
            tile=tile,
            group=group,
            scale=scale,
            window=window,
            attention_chunk=attention_chunk,
            soft_cap=soft_cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_rows, num_kv_heads, num_tiles, num_pages),
            in_specs=[
                pl.BlockSpec((1, 1, tile * group, head_size), lambda r, k, t, p, *_: (r, k, t, 0)),
                pl.BlockSpec(
                    (1, 2, 1, page_size, head_size), lambda r, k, t, p, starts, lens, tables: (tables[r, p], 0, k, 0, 0)
                ),
                pl.BlockSpec((1, 1, tile * group), lambda r, k, t, p, *_: (k, 0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, tile * group, head_size), lambda r, k, t, p, *_: (r, k, t, 0)),
            scratch_shapes=[
                pltpu.VMEM((tile * group, 1), jnp.float32),
                pltpu.VMEM((tile * group, 1), jnp.float32),
                pltpu.VMEM((tile * group, head_size), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_RKMD.shape, q_THD.dtype),
        interpret=interpret,
    )(query_starts, context_lens, block_tables, q_RKMD, cache_N2KBD, sinks_KM)
    out_RQHD = out_RKMD.reshape(num_rows, num_kv_heads, -1, group, head_size).transpose(0, 2, 1, 3, 4)
    out_RQHD = out_RQHD.reshape(num_rows, -1, num_heads, head_size)
    row_T = jnp.clip(jnp.searchsorted(query_starts, jnp.arange(num_tokens), side="right") - 1, 0, num_rows - 1)
    return out_RQHD[row_T, jnp.arange(num_tokens) - query_starts[row_T]]


def _kernel(
    query_starts,
    context_lens,
    block_tables,
    q_ref,
    page_ref,
    sinks_ref,
    out_ref,
    max_ref,
    sum_ref,
    acc_ref,
    *,
    page_size: int,
    tile: int,
    group: int,
    scale: float,
    window: int,
    attention_chunk: int,
    soft_cap: float,
) -> None:
    """One tile of queries and one page. M: rows of the tile, B: tokens of the page."""
    del block_tables  # It has placed page_ref.
    row, first_query, page = pl.program_id(0), pl.program_id(2) * tile, pl.program_id(3)
    context_len = context_lens[row]
    num_queries = query_starts[row + 1] - query_starts[row]

    @pl.when(page == 0)
    def _begin() -> None:
        # A sink is a key without a value: exp(sink - sink) in the sum.
        sink_M1 = sinks_ref[0].reshape(-1, 1)
        max_ref[...] = sink_M1
        sum_ref[...] = jnp.where(sink_M1 > _MASKED, 1.0, 0.0)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when((page * page_size < context_len) & (first_query < num_queries))
    def _attend() -> None:
        q_MD = q_ref[0, 0].astype(jnp.float32) * scale
        k_BD, v_BD = (page_ref[0, kind, 0].astype(jnp.float32) for kind in (0, 1))
        scores_MB = jax.lax.dot_general(q_MD, k_BD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if soft_cap:
            scores_MB = soft_cap * jnp.tanh(scores_MB / soft_cap)
        shape = scores_MB.shape
        query_MB = first_query + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // group
        key_MB = page * page_size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        position_MB = context_len - num_queries + query_MB
        seen_MB = (key_MB <= position_MB) & (query_MB < num_queries)
        if window:
            seen_MB &= key_MB > position_MB - window
        if attention_chunk:
            seen_MB &= key_MB >= position_MB - position_MB % attention_chunk
        scores_MB = jnp.where(seen_MB, scores_MB, _MASKED)
        before_M1 = max_ref[...]
        now_M1 = jnp.maximum(before_M1, scores_MB.max(axis=1, keepdims=True))
        # Where nothing is seen, scores equal the maximum: they must not count.
        weights_MB = jnp.where(seen_MB, jnp.exp(scores_MB - now_M1), 0.0)
        shrink_M1 = jnp.exp(before_M1 - now_M1)
        max_ref[...] = now_M1
        sum_ref[...] = sum_ref[...] * shrink_M1 + weights_MB.sum(axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * shrink_M1 + jnp.dot(weights_MB, v_BD, preferred_element_type=jnp.float32)

    @pl.when(page == pl.num_programs(3) - 1)
    def _end() -> None:
        total_M1 = sum_ref[...]
        # A row of padding has seen nothing.
        out_MD = jnp.where(total_M1 > 0, acc_ref[...] / jnp.where(total_M1 > 0, total_M1, 1.0), 0.0)
        out_ref[0, 0] = out_MD.astype(out_ref.dtype)
