"""Attention of rows with many queries, in one pass; masks only where the diagonal, or the edge of a window or a
chunk of positions, runs."""

import triton.language as tl

from kernels.paged_attention.gpu_schedule import PREFILL, first_token
from kernels.paged_attention.gpu_softmax import (
    attend_tile,
    before_any,
    find_row,
    lane_slopes,
    load_lanes,
    load_scale,
    load_tile,
    normalized,
    store_lanes,
    table_of,
)
from kernels.tiles.jit import jit


@jit
def prefill_kernel(
    q, cache, out, query_starts, context_lens, block_tables, table_rows, starts,
    sinks, alibi_slopes, k_scale, v_scale, factor, num_rows, q_stride, out_stride, table_stride, line_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """A program a KV head and tile of queries. There are as many as rows and tokens could need; the others end at once.

    Tiles begin from the last, whose queries see most, so that short ones fill the gaps at the end. Those of one head
    run side by side, and find its keys and values in the L2 cache.
    """
    QUERIES: tl.constexpr = LANES // GROUP
    starts += PREFILL * line_stride
    kv_head = tl.program_id(1)
    tile = tl.load(starts + num_rows) - 1 - tl.program_id(0)
    if tile >= 0:
        row = find_row(starts, tile, num_rows)
        first_query = tl.load(query_starts + row)
        queries = tl.load(query_starts + row + 1) - first_query
        context = tl.load(context_lens + row)
        first_of_tile = (tile - tl.load(starts + row)) * QUERIES

        lane = tl.arange(0, LANES)
        lane_query = first_of_tile + lane // GROUP
        lane_head = kv_head * GROUP + lane % GROUP
        active = (lane < QUERIES * GROUP) & (lane_query < queries)
        first_position = context - queries + first_of_tile
        last_position = tl.minimum(first_position + QUERIES, context) - 1
        lane_position = tl.where(active, first_position + lane // GROUP, -1)

        q_tile = load_lanes(q, first_query, lane_query, lane_head, active, q_stride, D, D_PADDED)
        key_factor = factor * load_scale(k_scale, kv_head, SCALE_PER_HEAD)
        slope = lane_slopes(alibi_slopes, lane_head, active, LANES)
        m, w = before_any(sinks, lane_head, active, LANES)
        acc = tl.zeros((LANES, D_PADDED), tl.float32)
        table = table_of(block_tables, table_rows, row, table_stride)

        low = first_token(context, queries - first_of_tile, WINDOW, ATTENTION_CHUNK)
        high = last_position + 1
        begin = low // TOKENS * TOKENS
        # Whole tiles that all of these queries see.
        diagonal = (first_position + 1) // TOKENS * TOKENS
        if WINDOW + ATTENTION_CHUNK > 0:
            seen_by_all = first_token(high, 1, WINDOW, ATTENTION_CHUNK)
            whole = tl.minimum(tl.cdiv(seen_by_all, TOKENS) * TOKENS, high)
            for start in range(begin, whole, TOKENS):
                k, v = load_tile(
                    cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=True
                )
                m, w, acc = attend_tile(
                    m, w, acc, q_tile, k, v, start, lane_position, key_factor, slope,
                    SOFT_CAP, alibi_slopes is not None, WINDOW, ATTENTION_CHUNK, TOKENS, MASKED=True,
                )  # fmt: skip
            begin = tl.maximum(begin, tl.cdiv(whole, TOKENS) * TOKENS)
        for start in range(begin, diagonal, TOKENS):
            k, v = load_tile(
                cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=False
            )
            m, w, acc = attend_tile(
                m, w, acc, q_tile, k, v, start, lane_position, key_factor, slope,
                SOFT_CAP, alibi_slopes is not None, WINDOW, ATTENTION_CHUNK, TOKENS, MASKED=False,
            )  # fmt: skip
        for start in range(tl.maximum(begin, diagonal), high, TOKENS):
            k, v = load_tile(
                cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=True
            )
            m, w, acc = attend_tile(
                m, w, acc, q_tile, k, v, start, lane_position, key_factor, slope,
                SOFT_CAP, alibi_slopes is not None, WINDOW, ATTENTION_CHUNK, TOKENS, MASKED=True,
            )  # fmt: skip
        result = normalized(w, acc, load_scale(v_scale, kv_head, SCALE_PER_HEAD))
        store_lanes(out, result, first_query, lane_query, lane_head, active, out_stride, D, D_PADDED)
