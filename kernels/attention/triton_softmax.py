"""The parts that the attention kernels share: reading tiles of a paged cache, scores, and the running softmax.

A running softmax is a triple (m, w, acc) per lane: the greatest score so far in units of log2, the sum of weights, and
the sum of weighted values, where a weight is 2^(score - m). It starts as (-inf, 0, 0).
"""

import triton.language as tl

from kernels.triton_common.jit import jit
from kernels.triton_common.numbers import dot, e4m3_halves, narrow, widen_to

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
# See `as_float16`.
SHRUNK = tl.constexpr(64.0)


@jit
def find_row(starts, item, num_rows):
    """The row that `item` belongs to: the last one with starts[row] <= item."""
    low, high = 0, num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) <= item:
            low = middle
        else:
            high = middle - 1
    return low


@jit
def load_lanes(
    tensor, first_token, lane_query, lane_head, active, token_stride, D: tl.constexpr, D_PADDED: tl.constexpr
):
    """Loads [lanes, D_PADDED] from a tensor [T, H, D]."""
    d = tl.arange(0, D_PADDED)
    offsets = (first_token + lane_query).to(tl.int64) * token_stride + lane_head * D
    mask = active[:, None]
    if D != D_PADDED:
        mask = mask & (d < D)[None]
    return tl.load(tensor + offsets[:, None] + d[None], mask=mask, other=0.0)


@jit
def as_float16(q):
    """Returns bfloat16 queries of an e4m3 cache as float16, times 1 / SHRUNK.

    A GPU converts two e4m3 numbers to float16 by one instruction, to bfloat16 by several. Queries from 2^-8 to 2^22
    keep all their digits; smaller ones are rounded to multiples of 2^-18.
    """
    return (q.to(tl.float32) * (1.0 / SHRUNK)).to(tl.float16)


@jit
def store_lanes(
    out, x, first_token, lane_query, lane_head, active, token_stride, D: tl.constexpr, D_PADDED: tl.constexpr
):
    d = tl.arange(0, D_PADDED)
    offsets = (first_token + lane_query).to(tl.int64) * token_stride + lane_head * D
    mask = active[:, None]
    if D != D_PADDED:
        mask = mask & (d < D)[None]
    tl.store(out + offsets[:, None] + d[None], narrow(x, out.dtype.element_ty), mask=mask)


@jit
def table_of(block_tables, table_rows, row, table_stride):
    """The address of a row's block ids. A padding row has none, and its empty context never looks one up."""
    if table_rows is not None:
        row = tl.load(table_rows + row)
    return block_tables + row.to(tl.int64) * table_stride


@jit
def load_tile(
    cache,
    table,
    kv_head,
    start,
    low,
    high,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys and values [TOKENS, D_PADDED] of the tokens from `start` on; zeros, unread, unless low <= token < high.

    Each token's block is looked up separately: programs gather whole rows of D numbers, whatever the block size. If a
    tile lies in one block, one look-up suffices.
    """
    token = start + tl.arange(0, TOKENS)
    d = tl.arange(0, D_PADDED)
    if BLOCK_SIZE % TOKENS == 0:
        # The tile lies within the block that holds `start`; a row that reads the tile has that block.
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        offsets = block * (2 * KV_HEADS * BLOCK_SIZE * D) + (kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * D
    else:
        if MASKED:
            block = tl.load(table + token // BLOCK_SIZE, mask=(token >= low) & (token < high), other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        offsets = block * (2 * KV_HEADS * BLOCK_SIZE * D) + (kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * D
    pointers = cache + offsets[:, None] + d[None]
    values = KV_HEADS * BLOCK_SIZE * D
    if MASKED:
        mask = ((token >= low) & (token < high))[:, None]
        if D != D_PADDED:
            mask = mask & (d < D)[None]
        k, v = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + values, mask=mask, other=0.0)
    elif D != D_PADDED:
        mask = (d < D)[None]
        k, v = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + values, mask=mask, other=0.0)
    else:
        k, v = tl.load(pointers), tl.load(pointers + values)
    return k, v


@jit
def attend_tile(
    m,
    w,
    acc,
    q,
    k,
    v,
    start,
    lane_position,
    factor,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax after one more tile.

    lane_position: the position of each lane's query; -1 sees nothing. factor: turns a product of query and key into a
    score in units of log2, or with SOFT_CAP in units of the cap.
    """
    s = dot(q, tl.trans(widen_to(k, q.dtype)), tl.zeros((q.shape[0], TOKENS), tl.float32))
    m, w, shrink, p = _weigh(
        m, w, s, start, lane_position, factor, q.dtype, SOFT_CAP, WINDOW, ATTENTION_CHUNK, TOKENS, MASKED
    )
    return m, w, dot(p, widen_to(v, q.dtype), acc * shrink[:, None])


@jit
def attend_pairs(
    m,
    w,
    even_acc,
    odd_acc,
    even_q,
    odd_q,
    k,
    v,
    start,
    lane_position,
    factor,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    FORM: tl.constexpr,
):
    """The same for keys and values that are pairs of e4m3, uint16 [TOKENS, D / 2]; queries and sums are cut into even
    and odd columns.

    A tensor core takes values whose tokens are neighbours in a register, and GPUs transpose units of 16 bits on the way
    from shared memory: e4m3 alone would be read from there byte by byte (1,498 instructions for 128 tokens of Llama's,
    compiled for sm_90 by Triton 3.6; pairs take 790).
    """
    even_k, odd_k = e4m3_halves(k, FORM)
    s = dot(even_q, tl.trans(even_k.to(even_q.dtype)), tl.zeros((even_q.shape[0], TOKENS), tl.float32))
    s = dot(odd_q, tl.trans(odd_k.to(odd_q.dtype)), s)
    m, w, shrink, p = _weigh(
        m, w, s, start, lane_position, factor, even_q.dtype, SOFT_CAP, WINDOW, ATTENTION_CHUNK, TOKENS, MASKED=True
    )
    even_v, odd_v = e4m3_halves(v, FORM)
    even_acc = dot(p, even_v.to(p.dtype), even_acc * shrink[:, None])
    odd_acc = dot(p, odd_v.to(p.dtype), odd_acc * shrink[:, None])
    return m, w, even_acc, odd_acc


@jit
def even_and_odd(x):
    """The even and the odd columns of a matrix; tl.interleave joins them again."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@jit
def evens_first(even, odd):
    """[rows, columns] of two halves, which stand side by side."""
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (even.shape[0], 2 * even.shape[1]))


@jit
def in_order(x):
    """The columns of `evens_first`, each odd one behind its even one again."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (x.shape[0], x.shape[1]))


@jit
def _weigh(
    m,
    w,
    s,
    start,
    lane_position,
    factor,
    dtype: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """m and w after one more tile, of products s; the factor that shrinks earlier sums; the tile's weights in dtype."""
    distance = lane_position[:, None] - (start + tl.arange(0, TOKENS))[None]
    if SOFT_CAP != 0.0:
        # tanh(x) = 1 - 2 / (1 + e^2x), which neither overflows nor needs libdevice.
        s = (SOFT_CAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(s * factor * (2.0 * LOG2E))))
    if MASKED:
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        if ATTENTION_CHUNK > 0:
            visible = visible & (distance <= (lane_position % ATTENTION_CHUNK)[:, None])
        s = tl.where(visible, s, NOTHING)
    if SOFT_CAP != 0.0:
        m_new = tl.maximum(m, tl.max(s, axis=1))
        safe = _finite(m_new)
        p = tl.exp2(s - safe[:, None])
    else:
        # The factor is positive, so the greatest product is the greatest score; s * factor - safe is one instruction.
        m_new = tl.maximum(m, tl.max(s, axis=1) * factor)
        safe = _finite(m_new)
        p = tl.exp2(s * factor - safe[:, None])
    shrink = tl.exp2(m - safe)
    return m_new, w * shrink + tl.sum(p, axis=1), shrink, narrow(p, dtype)


@jit
def fold(m, w, acc, chunk_m, chunk_w, chunk_acc):
    """Merges two running softmaxes. All kernels reduce chunks with it from left to right, beginning with `before_any`.
    If one side has seen nothing, the result is bitwise the other side. Explicit fma leaves compilers no choice."""
    m_new = tl.maximum(m, chunk_m)
    safe = _finite(m_new)
    shrink, chunk_shrink = tl.exp2(m - safe), tl.exp2(chunk_m - safe)
    w_new = tl.fma(w, shrink, chunk_w * chunk_shrink)
    acc_new = tl.fma(acc, shrink[:, None], chunk_acc * chunk_shrink[:, None])
    return m_new, w_new, acc_new


@jit
def normalized(w, acc, value_scale):
    """The attention result: weighted values over weights; zeros for a lane that saw nothing."""
    return acc * (value_scale / tl.where(w == 0.0, 1.0, w))[:, None]


@jit
def load_scale(scale, kv_head, PER_HEAD: tl.constexpr):
    """The scale of an e4m3 cache; 1 if there is none."""
    if scale is None:
        result = 1.0
    elif PER_HEAD:
        result = tl.load(scale + kv_head)
    else:
        result = tl.load(scale)
    return result


@jit
def before_any(sinks, lane_head, active, LANES: tl.constexpr):
    """m and w before the first token: a sink is a score that has no value."""
    if sinks is None:
        m, w = tl.full((LANES,), NOTHING, tl.float32), tl.zeros((LANES,), tl.float32)
    else:
        m = tl.load(sinks + lane_head, mask=active, other=0.0).to(tl.float32) * LOG2E
        w = tl.full((LANES,), 1.0, tl.float32)
    return m, w


@jit
def _finite(m):
    return tl.where(m == NOTHING, 0.0, m)
