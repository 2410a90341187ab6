"""The Triton kernels of paged attention: decodes in one pass (v1) or in chunks reduced afterwards (v2), and
prefills.

v1 and v2 keep a running softmax for each chunk and fold chunks from left to right, v1 in registers, v2 through memory.
Both give the same bits, so the choice between them is a matter of speed alone.
"""

import triton.language as tl

from kernels.attention.triton_schedule import PARTIALS, PREFILL, first_token
from kernels.attention.triton_softmax import (
    NOTHING,
    SHRUNK,
    as_float16,
    attend_pairs,
    attend_tile,
    before_any,
    even_and_odd,
    find_row,
    fold,
    load_lanes,
    load_scale,
    load_tile,
    normalized,
    store_lanes,
    table_of,
)
from kernels.triton_common.jit import jit


@jit(do_not_specialize=["num_rows"])
def decode_kernel(
    q,
    cache,
    out,
    query_starts,
    context_lens,
    block_tables,
    table_rows,
    starts,
    partial_sums,
    partial_values,
    sinks,
    k_scale,
    v_scale,
    factor,
    num_rows,
    q_stride,
    out_stride,
    table_stride,
    line_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A fixed number of programs loop over pieces of work: (row, tile of queries, KV head, one chunk or all).

    PAIRS: for a cache of e4m3 given as uint16, a pair a number, the form in which `attend_pairs` converts them; acc
    then has the even columns, and acc_odd the others. None: other caches."""
    HALVES: tl.constexpr = tl.constexpr(2 if PAIRS is not None else 1)
    COLUMNS: tl.constexpr = D_PADDED // HALVES
    QUERIES: tl.constexpr = LANES // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    lane = tl.arange(0, LANES)
    for item in range(tl.program_id(0), tl.load(starts + num_rows) * KV_HEADS, tl.num_programs(0)):
        row = find_row(starts, item // KV_HEADS, num_rows)
        first_query = tl.load(query_starts + row)
        queries = tl.load(query_starts + row + 1) - first_query
        context = tl.load(context_lens + row)
        row_start = tl.load(starts + row)
        tiles = tl.cdiv(queries, QUERIES)
        num_chunks = (tl.load(starts + row + 1) - row_start) // tiles
        first_partial = tl.load(starts + PARTIALS * line_stride + row)
        is_split = tl.load(starts + PARTIALS * line_stride + row + 1) > first_partial
        # Tiles that read the same keys are neighbours.
        within = item - row_start * KV_HEADS
        first_of_tile = within % tiles * QUERIES
        kv_head = within // tiles % KV_HEADS
        chunk = within // tiles // KV_HEADS

        lane_query = first_of_tile + lane // GROUP
        lane_head = kv_head * GROUP + lane % GROUP
        active = (lane < QUERIES * GROUP) & (lane_query < queries)
        lane_position = tl.where(active, context - queries + lane_query, -1)
        last_query = tl.minimum(first_of_tile + QUERIES, queries) - 1
        low = first_token(context, queries - first_of_tile, WINDOW, ATTENTION_CHUNK)
        high = tl.minimum(context - queries + last_query + 1, context)
        if is_split:
            chunk_start = (first_token(context, queries, WINDOW, ATTENTION_CHUNK) // CHUNK + chunk) * CHUNK
            low = tl.maximum(low, chunk_start)
            high = tl.minimum(high, chunk_start + CHUNK)

        q_tile = load_lanes(q, first_query, lane_query, lane_head, active, q_stride, D, D_PADDED)
        key_factor = factor * load_scale(k_scale, kv_head, SCALE_PER_HEAD)
        if (PAIRS is not None or cache.dtype.element_ty == tl.float8e4nv) and q.dtype.element_ty == tl.bfloat16:
            q_tile = as_float16(q_tile)
            key_factor *= SHRUNK
        all_m, all_w = before_any(sinks, lane_head, active, LANES)
        all_acc = tl.zeros((LANES, COLUMNS), tl.float32)
        m, w = tl.full((LANES,), NOTHING, tl.float32), tl.zeros((LANES,), tl.float32)
        acc = tl.zeros((LANES, COLUMNS), tl.float32)
        q_odd, all_odd, acc_odd = q_tile, all_acc, acc
        if PAIRS is not None:
            q_tile, q_odd = even_and_odd(q_tile)
        table = table_of(block_tables, table_rows, row, table_stride)
        # Every tile is masked: memory is the limit here, and a separate loop for the last tile would have to refill the
        # pipeline.
        for start in range(low // TOKENS * TOKENS, high, TOKENS):
            if start == start // CHUNK * CHUNK:
                if PAIRS is not None:
                    _, _, all_odd = fold(all_m, all_w, all_odd, m, w, acc_odd)
                    acc_odd = tl.zeros((LANES, COLUMNS), tl.float32)
                all_m, all_w, all_acc = fold(all_m, all_w, all_acc, m, w, acc)
                m, w = tl.full((LANES,), NOTHING, tl.float32), tl.zeros((LANES,), tl.float32)
                acc = tl.zeros((LANES, COLUMNS), tl.float32)
            k, v = load_tile(
                cache, table, kv_head, start, low, high, KV_HEADS, D // HALVES, COLUMNS, BLOCK_SIZE, TOKENS, MASKED=True
            )
            if PAIRS is not None:
                m, w, acc, acc_odd = attend_pairs(
                    m,
                    w,
                    acc,
                    acc_odd,
                    q_tile,
                    q_odd,
                    k,
                    v,
                    start,
                    lane_position,
                    key_factor,
                    SOFT_CAP,
                    WINDOW,
                    ATTENTION_CHUNK,
                    TOKENS,
                    PAIRS,
                )
            else:
                m, w, acc = attend_tile(
                    m,
                    w,
                    acc,
                    q_tile,
                    k,
                    v,
                    start,
                    lane_position,
                    key_factor,
                    SOFT_CAP,
                    WINDOW,
                    ATTENTION_CHUNK,
                    TOKENS,
                    MASKED=True,
                )

        if is_split:
            values = tl.interleave(acc, acc_odd) if PAIRS is not None else acc
            partial = (first_partial + lane_query * num_chunks + chunk).to(tl.int64) * HEADS + lane_head
            tl.store(partial_sums + partial * 2, m, mask=active)
            tl.store(partial_sums + partial * 2 + 1, w, mask=active)
            d = tl.arange(0, D_PADDED)
            tl.store(partial_values + partial[:, None] * D + d[None], values, mask=active[:, None] & (d < D)[None])
        else:
            values = tl.interleave(acc, acc_odd) if PAIRS is not None else acc
            all_values = tl.interleave(all_acc, all_odd) if PAIRS is not None else all_acc
            _, weights, all_values = fold(all_m, all_w, all_values, m, w, values)
            result = normalized(weights, all_values, load_scale(v_scale, kv_head, SCALE_PER_HEAD))
            store_lanes(out, result, first_query, lane_query, lane_head, active, out_stride, D, D_PADDED)


@jit(do_not_specialize=["num_rows"])
def prefill_kernel(
    q,
    cache,
    out,
    query_starts,
    context_lens,
    block_tables,
    table_rows,
    starts,
    sinks,
    k_scale,
    v_scale,
    factor,
    num_rows,
    q_stride,
    out_stride,
    table_stride,
    line_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
):
    """One program per KV head and tile of queries. The grid covers the most tiles possible; surplus programs exit.

    Tiles go from last to first: the last queries see most, and short tiles fill the gaps at the end. Tiles of one head
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
        if cache.dtype.element_ty == tl.float8e4nv and q.dtype.element_ty == tl.bfloat16:
            q_tile = as_float16(q_tile)
            key_factor *= SHRUNK
        m, w = before_any(sinks, lane_head, active, LANES)
        acc = tl.zeros((LANES, D_PADDED), tl.float32)
        table = table_of(block_tables, table_rows, row, table_stride)

        low = first_token(context, queries - first_of_tile, WINDOW, ATTENTION_CHUNK)
        high = last_position + 1
        begin = low // TOKENS * TOKENS
        # Tiles before `diagonal` are visible to all of these queries in full.
        diagonal = (first_position + 1) // TOKENS * TOKENS
        if WINDOW + ATTENTION_CHUNK > 0:
            seen_by_all = first_token(high, 1, WINDOW, ATTENTION_CHUNK)
            whole = tl.minimum(tl.cdiv(seen_by_all, TOKENS) * TOKENS, high)
            for start in range(begin, whole, TOKENS):
                k, v = load_tile(
                    cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=True
                )
                m, w, acc = attend_tile(
                    m,
                    w,
                    acc,
                    q_tile,
                    k,
                    v,
                    start,
                    lane_position,
                    key_factor,
                    SOFT_CAP,
                    WINDOW,
                    ATTENTION_CHUNK,
                    TOKENS,
                    MASKED=True,
                )
            begin = tl.maximum(begin, tl.cdiv(whole, TOKENS) * TOKENS)
        for start in range(begin, diagonal, TOKENS):
            k, v = load_tile(
                cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=False
            )
            m, w, acc = attend_tile(
                m,
                w,
                acc,
                q_tile,
                k,
                v,
                start,
                lane_position,
                key_factor,
                SOFT_CAP,
                WINDOW,
                ATTENTION_CHUNK,
                TOKENS,
                MASKED=False,
            )
        for start in range(tl.maximum(begin, diagonal), high, TOKENS):
            k, v = load_tile(
                cache, table, kv_head, start, low, high, KV_HEADS, D, D_PADDED, BLOCK_SIZE, TOKENS, MASKED=True
            )
            m, w, acc = attend_tile(
                m,
                w,
                acc,
                q_tile,
                k,
                v,
                start,
                lane_position,
                key_factor,
                SOFT_CAP,
                WINDOW,
                ATTENTION_CHUNK,
                TOKENS,
                MASKED=True,
            )
        result = normalized(w, acc, load_scale(v_scale, kv_head, SCALE_PER_HEAD))
        store_lanes(out, result, first_query, lane_query, lane_head, active, out_stride, D, D_PADDED)
