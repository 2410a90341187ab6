"""Multi-head latent attention on a GPU (DeepSeek-V2, arXiv 2405.04434), with absorbed weights: heads share the
cache.

Legend: T tokens, S rows, H heads, L latent size, R rope size. kernels.kv_cache.layout defines the cache layout.
"""

import torch
import triton.language as tl

from kernels.attention.latent.triton_schedule import WIDE_FITS, WIDE_LANES, MlaSchedule
from kernels.attention.triton_reduce import reduce_chunks
from kernels.attention.triton_schedule import PARTIALS, check_table_rows
from kernels.attention.triton_softmax import (
    LOG2E,
    NOTHING,
    SHRUNK,
    as_float16,
    even_and_odd,
    evens_first,
    find_row,
    fold,
    in_order,
    normalized,
    table_of,
)
from kernels.kv_cache.layout import LatentShape, check_mla_cache, check_mla_scale, kernel_view, pair_view
from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, e4m3_halves, narrow, recomputed, widen_to

_IF_ENDS_CHAIN = tl.constexpr(WIDE_FITS)
_WIDE = tl.constexpr(WIDE_LANES)
# Numbers of a latent folded at once.
_PIECE = tl.constexpr(64)


@jit(do_not_specialize=["num_rows"])
def mla_decode_kernel(
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
    own_values,
    kv_scale,
    factor,
    num_rows,
    q_stride,
    out_stride,
    table_stride,
    line_stride,
    HEAD_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A fixed number of programs loop over pieces of work: (row, tile of queries, group of heads, one chunk or all).
    own_values: [programs, 2, LANES, LATENT], each program's own memory for folding.

    PAIRS: for a cache of e4m3 given as uint16, a pair a number, the PairForm in which they are converted. Queries,
    entries and sums then have their even columns first, which takes 2 instructions for 4 numbers. None: other caches.
    """
    QUERIES: tl.constexpr = LANES // GROUP
    HEADS: tl.constexpr = HEAD_GROUPS * GROUP
    lane = tl.arange(0, LANES)
    number = tl.arange(0, LATENT)
    if kv_scale is None:
        value_scale = 1.0
    else:
        value_scale = tl.load(kv_scale)
    factor *= value_scale
    # Accumulator and addresses leave no registers for loop invariants, so these are recomputed (disable_licm).
    num_items = tl.load(starts + num_rows) * HEAD_GROUPS
    for item in tl.range(  # pyright: ignore[reportGeneralTypeIssues] - Triton's own compiler iterates
        tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True
    ):
        row = find_row(starts, item // HEAD_GROUPS, num_rows)
        first_query, queries, context, first_of_tile, head_group, chunk, _, _, is_split = _piece_of_work(
            query_starts, context_lens, starts, row, item, line_stride, HEAD_GROUPS, QUERIES
        )
        lane_query = first_of_tile + lane // GROUP
        lane_head = head_group * GROUP + lane % GROUP
        active = (lane < QUERIES * GROUP) & (lane_query < queries)
        lane_position = tl.where(active, context - queries + lane_query, -1)
        last_query = tl.minimum(first_of_tile + QUERIES, queries) - 1
        low, high = 0, tl.minimum(context - queries + last_query + 1, context)
        if is_split:
            low = chunk * CHUNK
            high = tl.minimum(high, low + CHUNK)
        folds = high - low > CHUNK

        lane_start = (first_query + lane_query).to(tl.int64) * q_stride + lane_head * (LATENT + ROPE)
        q_lanes = q + lane_start[:, None]
        q_latent = tl.load(q_lanes + number[None], mask=active[:, None], other=0.0)
        q_rope = tl.load(q_lanes + LATENT + tl.arange(0, ROPE)[None], mask=active[:, None], other=0.0)
        key_factor = factor
        if PAIRS is not None:
            if q.dtype.element_ty == tl.bfloat16:
                q_latent, q_rope = as_float16(q_latent), as_float16(q_rope)
                key_factor *= SHRUNK
            q_even, q_odd = even_and_odd(q_latent)
            q_latent = evens_first(q_even, q_odd)
            q_even, q_odd = even_and_odd(q_rope)
            q_rope = evens_first(q_even, q_odd)
            if LANES == _WIDE and q.dtype.element_ty != tl.float32:
                q_latent, q_rope = _through_memory(_own(own_values, LANES, LATENT) + LANES * LATENT, q_latent, q_rope)
        all_m, all_w = tl.full((LANES,), NOTHING, tl.float32), tl.zeros((LANES,), tl.float32)
        acc = tl.zeros((LANES, LATENT), tl.float32)
        for chunk_start in tl.range(low, high, CHUNK, disable_licm=True):  # pyright: ignore[reportGeneralTypeIssues]
            m, w = tl.full((LANES,), NOTHING, tl.float32), tl.zeros((LANES,), tl.float32)
            acc = tl.zeros((LANES, LATENT), tl.float32)
            # Once more for each chunk, for the same reason.
            table = table_of(block_tables, table_rows, recomputed(row), table_stride)
            for start in range(chunk_start, tl.minimum(high, chunk_start + CHUNK), TOKENS):
                latent, rope = _load_entries(cache, table, start, high, LATENT, ROPE, BLOCK_SIZE, TOKENS, PAIRS)
                m, w, acc = _attend(m, w, acc, q_latent, q_rope, latent, rope, start, high, lane_position, key_factor)
            if folds:
                own = _own(own_values, LANES, LATENT)
                all_m, all_w = _fold_in_memory(own, all_m, all_w, m, w, acc, chunk_start // CHUNK)
            else:
                all_m, all_w = m, w

        # The same once more, from the row alone: kept in registers beside the sums, it makes Triton 3.7 spill (104 B).
        first_query, queries, context, first_of_tile, head_group, chunk, first_partial, num_chunks, is_split = (
            _piece_of_work(query_starts, context_lens, starts, recomputed(row), item, line_stride, HEAD_GROUPS, QUERIES)
        )
        lane_query = first_of_tile + lane // GROUP
        lane_head = head_group * GROUP + lane % GROUP
        active = (lane < QUERIES * GROUP) & (lane_query < queries)
        out_lanes = out + ((first_query + lane_query).to(tl.int64) * out_stride + lane_head * LATENT)[:, None]
        if is_split:
            partial = (first_partial + lane_query * num_chunks + chunk).to(tl.int64) * HEADS + lane_head
            tl.store(partial_sums + partial * 2, all_m, mask=active)
            tl.store(partial_sums + partial * 2 + 1, all_w, mask=active)
            values = in_order(acc) if PAIRS is not None else acc
            tl.store(partial_values + partial[:, None] * LATENT + number[None], values, mask=active[:, None])
        elif folds:
            last = _own(own_values, LANES, LATENT) + (high - 1) // CHUNK % 2 * (LANES * LATENT)
            tl.debug_barrier()
            for first in range(0, LATENT, _PIECE):
                result = normalized(all_w, tl.load(last + _piece_of_latents(LANES, LATENT, first)), value_scale)
                column = first + tl.arange(0, _PIECE)
                if PAIRS is not None:
                    column = column % (LATENT // 2) * 2 + column // (LATENT // 2)
                tl.store(out_lanes + column[None], narrow(result, out.dtype.element_ty), mask=active[:, None])
        else:
            values = in_order(acc) if PAIRS is not None else acc
            result = normalized(all_w, values, value_scale)
            tl.store(out_lanes + number[None], narrow(result, out.dtype.element_ty), mask=active[:, None])


@jit
def _own(own_values, LANES: tl.constexpr, LATENT: tl.constexpr):
    """The program's own memory."""
    return own_values + recomputed(tl.program_id(0)) * (2 * LANES * LATENT)


@jit
def _piece_of_work(
    query_starts, context_lens, starts, row, item, line_stride, HEAD_GROUPS: tl.constexpr, QUERIES: tl.constexpr
):
    """The row's first query, queries and context; the first query, the group of heads and the chunk of this item's
    tile; the row's first partial sum and number of chunks, and if it is split into them."""
    first_query = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - first_query
    context = tl.load(context_lens + row)
    row_start = tl.load(starts + row)
    tiles = tl.cdiv(queries, QUERIES)
    num_chunks = (tl.load(starts + row + 1) - row_start) // tiles
    line = PARTIALS * line_stride + row
    first_partial = tl.load(starts + line)
    is_split = tl.load(starts + line + 1) > first_partial
    # Groups of heads that read the same entries are neighbours, so that one finds in L2 what another has read.
    within = item - row_start * HEAD_GROUPS
    head_group = within % HEAD_GROUPS
    first_of_tile = within // HEAD_GROUPS % tiles * QUERIES
    chunk = within // HEAD_GROUPS // tiles
    return first_query, queries, context, first_of_tile, head_group, chunk, first_partial, num_chunks, is_split


@jit
def _through_memory(own, q_latent, q_rope):
    """Queries as they are, but loaded: Triton gives wgmma only what was loaded from shared memory; what was computed
    stays in registers, 72 of them here, and spills (272 B on Triton 3.9). own: the program's memory for one chunk."""
    LATENT: tl.constexpr = q_latent.shape[1]
    memory = own.to(tl.pointer_type(q_latent.dtype))
    latent = memory + tl.arange(0, q_latent.shape[0])[:, None] * LATENT + tl.arange(0, LATENT)[None]
    rope = memory + q_latent.shape[0] * LATENT
    rope += tl.arange(0, q_rope.shape[0])[:, None] * q_rope.shape[1] + tl.arange(0, q_rope.shape[1])[None]
    # Threads load what others stored, and may still be reading sums of the item before.
    tl.debug_barrier()
    tl.store(latent, q_latent)
    tl.store(rope, q_rope)
    tl.debug_barrier()
    return tl.load(latent), tl.load(rope)


@jit
def _load_entries(
    cache,
    table,
    start,
    high,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Latents [TOKENS, LATENT] and rope parts [TOKENS, ROPE] of the tokens from `start` on; zeros, unread, from `high`
    on. With PAIRS, as float16 with the even columns first."""
    HALVES: tl.constexpr = tl.constexpr(2 if PAIRS is not None else 1)
    token = start + tl.arange(0, TOKENS)
    inside = token < high
    block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    entries = cache + ((block * BLOCK_SIZE + token % BLOCK_SIZE) * ((LATENT + ROPE) // HALVES))[:, None]
    latent = tl.load(entries + tl.arange(0, LATENT // HALVES)[None], mask=inside[:, None], other=0.0)
    entries += LATENT // HALVES
    rope = tl.load(entries + tl.arange(0, ROPE // HALVES)[None], mask=inside[:, None], other=0.0)
    if PAIRS is not None:
        even, odd = e4m3_halves(latent, PAIRS)
        latent = evens_first(even, odd)
        even, odd = e4m3_halves(rope, PAIRS)
        rope = evens_first(even, odd)
    return latent, rope


@jit
def _attend(m, w, acc, q_latent, q_rope, latent, rope, start, high, lane_position, factor):
    """The running softmax after one more tile of entries. lane_position: each lane's query's; -1 sees nothing."""
    LANES: tl.constexpr = q_latent.shape[0]
    TOKENS: tl.constexpr = latent.shape[0]
    values = widen_to(latent, q_latent.dtype)
    none = tl.zeros((LANES, TOKENS), tl.float32)
    s = dot(q_latent, tl.trans(values), none)
    if _IF_ENDS_CHAIN:
        s_rope = dot(q_rope, tl.trans(widen_to(rope, q_rope.dtype)), none)
    else:
        s = dot(q_rope, tl.trans(widen_to(rope, q_rope.dtype)), s)
        s_rope = none
    # If a dot's result feeds another dot, Triton splits warps along lanes only: with 64 lanes, both warp groups of
    # Hopper would compute the same scores. It doesn't look through an `if`, though this one is true for every tile. For
    # the same reason the two products are added only inside it.
    if _IF_ENDS_CHAIN:
        if start < high:
            m, w, shrink, weights = _weigh(m, w, s, s_rope, start, lane_position, factor, values.dtype)
        else:
            shrink, weights = m, narrow(s, values.dtype)
    else:
        m, w, shrink, weights = _weigh(m, w, s, s_rope, start, lane_position, factor, values.dtype)
    return m, w, dot(weights, values, acc * shrink[:, None])


@jit
def _weigh(m, w, s, s_rope, start, lane_position, factor, dtype: tl.constexpr):
    """Returns m and w after one more tile, the factor that shrinks earlier sums, and the tile's weights in dtype."""
    visible = lane_position[:, None] >= (start + tl.arange(0, s.shape[1]))[None]
    s = tl.where(visible, s * factor + s_rope * factor, NOTHING)
    m_new = tl.maximum(m, tl.max(s, axis=1))
    safe = tl.where(m_new == NOTHING, 0.0, m_new)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(m - safe)
    return m_new, w * shrink + tl.sum(p, axis=1), shrink, narrow(p, dtype)


@jit
def _fold_in_memory(own, all_m, all_w, m, w, acc, chunk):
    """Returns m and w of all chunks up to this one; leaves their values in own[chunk % 2]. `own` is the program's own
    memory and mostly stays in L2: registers don't hold two accumulators of 64 lanes."""
    LANES: tl.constexpr = acc.shape[0]
    LATENT: tl.constexpr = acc.shape[1]
    before = own + (chunk + 1) % 2 * (LANES * LATENT)
    own += chunk % 2 * (LANES * LATENT)
    # A thread loads numbers that other threads have stored.
    tl.debug_barrier()
    tl.store(own + tl.arange(0, LANES)[:, None] * LATENT + tl.arange(0, LATENT)[None], acc)
    tl.debug_barrier()
    new_m, new_w = all_m, all_w
    for first in range(0, LATENT, _PIECE):
        piece = _piece_of_latents(LANES, LATENT, first)
        all_acc = tl.load(before + piece, mask=(piece >= 0) & (chunk > 0), other=0.0)
        new_m, new_w, values = fold(all_m, all_w, all_acc, m, w, tl.load(own + piece))
        tl.store(own + piece, values)
    return new_m, new_w


@jit
def _piece_of_latents(LANES: tl.constexpr, LATENT: tl.constexpr, first):
    """Offsets of a piece, [LANES, _PIECE]."""
    return tl.arange(0, LANES)[:, None] * LATENT + (first + tl.arange(0, _PIECE))[None]


def mla_attention(
    q_THE: torch.Tensor,
    cache: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    schedule: MlaSchedule,
    table_rows: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    may_split: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q . (latent | rope)) @ latent of each query over its row's context, [T, H, L] in q's dtype;
    softmax and sums are float32.

    Row i's queries are tokens query_starts[i] : query_starts[i + 1], and the last of its context_lens[i] tokens, whose
    entries are in the cache. Nothing else of the cache is read. Rows of no queries are skipped; a row whose context is
    0 (padding of a captured graph) gets zeros; tokens from query_starts[-1] on stay as they are in `out`.

    Meant for decodes, drafts and short chunks. Long prompts work, tile by tile, but each product takes L + R numbers
    here: kernels.attention.paged computes them faster with expanded keys and values.

    q_THE: bf16, fp16 or fp32, E = L + R: first the part multiplied by the absorbed key weight, then the part rotated by
    rope; heads are contiguous, tokens may have any stride.
    query_starts: int32 [S + 1]. context_lens: int32 [S]. block_tables: int32 [S, any], block ids in order.
    table_rows: int32 [S]; row i's blocks are block_tables[table_rows[i]], so that tables of permanent rows stay where
    they are; -1 for padding, which has no table to read. None: block_tables[i].
    scale: multiplies products of queries and entries, above 0. It comes from the expanded head size: (128 + 64) ** -0.5
    for DeepSeek. schedule: made for this step by `MlaSchedule.update`. kv_scale: float32 [1], for an e4m3 cache.
    may_split: False saves the launch that reduces chunks of contexts (`MlaSchedule.decodes_of`).

    Raises ValueError for shapes, dtypes and layouts that differ from these.
    """
    shape, tiles = schedule.shape, schedule.decode
    _check(q_THE, cache, schedule, block_tables, scale)
    check_mla_scale(cache, kv_scale)
    check_table_rows(table_rows, context_lens)
    out_shape = (len(q_THE), shape.num_heads, shape.latent_size)
    out_THL = torch.empty(out_shape, dtype=q_THE.dtype, device=q_THE.device) if out is None else out
    if out_THL.shape != out_shape or out_THL.stride()[1:] != (shape.latent_size, 1):
        raise ValueError(
            f"out of shape {tuple(out_THL.shape)}, strides {out_THL.stride()}: expected {out_shape}, heads contiguous"
        )

    num_rows, starts, groups = len(context_lens), schedule.starts, schedule.heads
    mla_decode_kernel[(schedule.num_programs,)](
        q_THE,
        kernel_view(cache) if schedule.pairs is None else pair_view(cache),
        out_THL,
        query_starts,
        context_lens,
        block_tables,
        table_rows,
        starts,
        schedule.partial_sums,
        schedule.partial_values,
        schedule.own_values,
        kv_scale,
        scale * LOG2E.value,
        num_rows,
        q_THE.stride(0),
        out_THL.stride(0),
        block_tables.stride(0),
        starts.stride(0),
        HEAD_GROUPS=groups.num_kv_heads,
        GROUP=groups.group_size,
        LATENT=shape.latent_size,
        ROPE=shape.rope_size,
        BLOCK_SIZE=cache.shape[1],
        LANES=tiles.lanes,
        TOKENS=tiles.tokens,
        CHUNK=schedule.chunk,
        PAIRS=schedule.pairs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if may_split:
        reduce_chunks(out_THL, query_starts, schedule, v_scale=kv_scale)
    return out_THL


def _check(
    q_THE: torch.Tensor, cache: torch.Tensor, schedule: MlaSchedule, block_tables: torch.Tensor, scale: float
) -> None:
    shape = schedule.shape
    check_mla_cache(cache, shape.entry_size)
    if q_THE.shape[1:] != (shape.num_heads, shape.entry_size) or q_THE.stride()[1:] != (shape.entry_size, 1):
        raise ValueError(
            f"q of shape {tuple(q_THE.shape)}, strides {q_THE.stride()}: [tokens, {shape.num_heads}, "
            f"{shape.entry_size}], heads contiguous, is expected for {shape}"
        )
    if cache.dtype is not schedule.cache_dtype:
        raise ValueError(f"the cache is of {cache.dtype}, the schedule for {schedule.cache_dtype}")
    if cache.dtype.itemsize > q_THE.dtype.itemsize:
        raise ValueError(f"a cache of {cache.dtype} is wider than queries of {q_THE.dtype}")
    if block_tables.stride(1) != 1:
        raise ValueError(f"block tables of strides {block_tables.stride()}: rows must be contiguous")
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0")


__all__ = ["LatentShape", "MlaSchedule", "mla_attention"]
