"""Combines the partial sums of contexts that were cut into chunks, for paged and latent attention."""

import torch
import triton.language as tl

from kernels.attention.triton_schedule import PARTIALS, REDUCED, AttentionSchedule, padded
from kernels.attention.triton_softmax import before_any, find_row, fold, load_scale, normalized, store_lanes
from kernels.triton_common.jit import jit

# Reduction programs per program that reads contexts: each is one warp that mostly waits for memory.
_REDUCTIONS_PER_PROGRAM = 8


def reduce_chunks(
    out_THD: torch.Tensor,
    query_starts: torch.Tensor,
    schedule: AttentionSchedule,
    *,
    sinks: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale_per_head: bool = False,
) -> None:
    """Stores the results of the rows that `schedule` split. Call it after the launch that fills the partial sums."""
    if not schedule.num_partials:
        return
    heads, starts = schedule.heads, schedule.starts
    num_programs = min(len(out_THD) * heads.num_heads, schedule.num_programs * _REDUCTIONS_PER_PROGRAM)
    reduce_kernel[(num_programs,)](
        out_THD,
        query_starts,
        starts,
        schedule.partial_sums,
        schedule.partial_values,
        sinks,
        v_scale,
        len(query_starts) - 1,
        out_THD.stride(0),
        starts.stride(0),
        KV_HEADS=heads.num_kv_heads,
        GROUP=heads.group_size,
        D=heads.head_size,
        D_PADDED=padded(heads.head_size),
        SCALE_PER_HEAD=scale_per_head,
        num_warps=1,
        num_stages=4,
    )


@jit(do_not_specialize=["num_rows"])
def reduce_kernel(
    out,
    query_starts,
    starts,
    partial_sums,
    partial_values,
    sinks,
    v_scale,
    num_rows,
    out_stride,
    line_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
):
    """Folds the chunks of each (query, head) pair; programs take pairs in turn."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    d = tl.arange(0, D_PADDED)
    reduced = starts + REDUCED * line_stride
    for item in range(tl.program_id(0), tl.load(reduced + num_rows) * HEADS, tl.num_programs(0)):
        row = find_row(reduced, item // HEADS, num_rows)
        query = item // HEADS - tl.load(reduced + row)
        first_query = tl.load(query_starts + row)
        queries = tl.load(query_starts + row + 1) - first_query
        first_partial = tl.load(starts + PARTIALS * line_stride + row)
        num_chunks = (tl.load(starts + PARTIALS * line_stride + row + 1) - first_partial) // queries
        # A single lane.
        head = item - item // HEADS * HEADS
        lane_query, lane_head = tl.full((1,), query, tl.int32), tl.full((1,), head, tl.int32)
        active = lane_query >= 0
        m, w = before_any(sinks, lane_head, active, 1)
        acc = tl.zeros((1, D_PADDED), tl.float32)
        first = (first_partial + query * num_chunks).to(tl.int64) * HEADS + lane_head
        for chunk in range(num_chunks):
            partial = first + chunk * HEADS
            chunk_acc = tl.load(partial_values + partial[:, None] * D + d[None], mask=(d < D)[None], other=0.0)
            chunk_m, chunk_w = tl.load(partial_sums + partial * 2), tl.load(partial_sums + partial * 2 + 1)
            m, w, acc = fold(m, w, acc, chunk_m, chunk_w, chunk_acc)
        result = normalized(w, acc, load_scale(v_scale, head // GROUP, SCALE_PER_HEAD))
        store_lanes(out, result, first_query, lane_query, lane_head, active, out_stride, D, D_PADDED)
