"""Paged attention on a GPU (arXiv 2309.06180), for steps that mix chunks of prefill and decodes.

Legend: T tokens, S rows, H heads, K KV heads, D head size; kernels.kv_cache.layout defines the cache.
"""

import torch

from kernels.attention.paged.triton_kernels import decode_kernel, prefill_kernel
from kernels.attention.triton_reduce import reduce_chunks
from kernels.attention.triton_schedule import AttentionSchedule, check_table_rows, padded
from kernels.attention.triton_softmax import LOG2E
from kernels.kv_cache.layout import HeadShape, check_gpu_cache, kernel_view, pair_view


def paged_attention(
    q_THD: torch.Tensor,
    cache: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    schedule: AttentionSchedule,
    table_rows: torch.Tensor | None = None,
    max_query_len: int | None = None,
    has_decodes: bool = True,
    may_split: bool = True,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

    Row i's queries are tokens query_starts[i] : query_starts[i + 1], and the last of its context_lens[i] tokens, whose
    keys and values are in the cache. Nothing else of the cache is read. Rows of no queries are skipped; a row whose
    context is 0 (padding of a captured graph) gets zeros; tokens from query_starts[-1] on stay as they are in `out`.

    `schedule`, made for this step by `AttentionSchedule.update`, assigns work to programs on the GPU. Its window or
    attention_chunk applies.

    q_THD: bf16, fp16 or fp32; heads are contiguous, tokens may have any stride.
    query_starts: int32 [S + 1]. context_lens: int32 [S]. block_tables: int32 [S, any], block ids in order.
    table_rows: int32 [S]; row i's blocks are block_tables[table_rows[i]], so that tables of permanent rows stay where
    they are; -1 for padding, which has no table to read. None: block_tables[i].
    scale: multiplies products of queries and keys, above 0. soft_cap: scores become soft_cap * tanh(score / soft_cap);
    0: no cap.
    max_query_len: an upper bound of the queries per row, which saves a launch if all rows are decodes; None: T.
    has_decodes, may_split: False saves the launch for decodes, and the one that reduces chunks of contexts
    (`AttentionSchedule.decodes_of`).
    sinks: [H], scores that join each softmax without a value.
    k_scale, v_scale: float32 [1] or [K], for an e4m3 cache.

    Raises ValueError for shapes, dtypes and layouts that differ from these.
    """
    heads, decode = schedule.heads, schedule.decode
    _check(q_THD, cache, schedule, scale, soft_cap, block_tables)
    check_table_rows(table_rows, context_lens)
    scale_per_head = _check_scales(cache, k_scale, v_scale)
    if sinks is not None and (sinks.shape != (heads.num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)}: [{heads.num_heads}], one number a head, is expected")
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device) if out is None else out
    if out_THD.shape != q_THD.shape or out_THD.stride()[1:] != (heads.head_size, 1):
        raise ValueError(f"out of shape {tuple(out_THD.shape)}, strides {out_THD.stride()}: it must be like q")

    num_tokens, num_rows = len(q_THD), len(context_lens)
    starts = schedule.starts
    step = (query_starts, context_lens, block_tables, table_rows, starts)
    # With a cap, scores are in units of the cap until the tanh.
    factor = scale / soft_cap if soft_cap else scale * LOG2E.value
    changes = (sinks, k_scale, v_scale, factor)
    strides = (num_rows, q_THD.stride(0), out_THD.stride(0), block_tables.stride(0), starts.stride(0))
    shape = {
        "KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group_size,
        "D": heads.head_size,
        "D_PADDED": padded(heads.head_size),
        "SCALE_PER_HEAD": scale_per_head,
    }
    form = {
        "BLOCK_SIZE": cache.shape[3],
        "WINDOW": schedule.window,
        "ATTENTION_CHUNK": schedule.attention_chunk,
        "SOFT_CAP": float(soft_cap),
    }
    kv = kernel_view(cache)
    if max_query_len is None:
        max_query_len = num_tokens
    if schedule.prefill is not None and max_query_len > schedule.queries_per_tile:
        prefill = schedule.prefill
        num_tiles = num_tokens // prefill.queries(heads.group_size) + num_rows
        prefill_kernel[(num_tiles, heads.num_kv_heads)](
            q_THD,
            kv,
            out_THD,
            *step,
            *changes,
            *strides,
            **shape,
            **form,
            LANES=prefill.lanes,
            TOKENS=prefill.tokens,
            num_warps=prefill.num_warps,
            num_stages=prefill.num_stages,
        )
    if has_decodes:
        decode_kernel[(schedule.num_programs,)](
            q_THD,
            kv if schedule.pairs is None else pair_view(cache),
            out_THD,
            *step,
            schedule.partial_sums,
            schedule.partial_values,
            *changes,
            *strides,
            **shape,
            **form,
            LANES=decode.lanes,
            TOKENS=decode.tokens,
            CHUNK=schedule.chunk,
            PAIRS=schedule.pairs,
            num_warps=decode.num_warps,
            num_stages=decode.num_stages,
        )
    if has_decodes and may_split:
        reduce_chunks(out_THD, query_starts, schedule, sinks=sinks, v_scale=v_scale, scale_per_head=scale_per_head)
    return out_THD


def _check(
    q_THD: torch.Tensor,
    cache: torch.Tensor,
    schedule: AttentionSchedule,
    scale: float,
    soft_cap: float,
    block_tables: torch.Tensor,
) -> None:
    check_gpu_cache(cache)
    heads = schedule.heads
    held = HeadShape(num_heads=q_THD.shape[1], num_kv_heads=cache.shape[2], head_size=q_THD.shape[2])
    if held != heads or cache.shape[4] != heads.head_size:
        raise ValueError(
            f"q of shape {tuple(q_THD.shape)}, a cache of shape {tuple(cache.shape)}, and a schedule for {heads}"
        )
    if cache.dtype is not schedule.cache_dtype:
        raise ValueError(f"the cache is of {cache.dtype}, the schedule for {schedule.cache_dtype}")
    if q_THD.stride()[1:] != (heads.head_size, 1):
        raise ValueError(f"q of strides {q_THD.stride()}: heads must be contiguous")
    if cache.dtype.itemsize > q_THD.dtype.itemsize:
        raise ValueError(f"a cache of {cache.dtype} is wider than queries of {q_THD.dtype}")
    if block_tables.stride(1) != 1:
        raise ValueError(f"block tables of strides {block_tables.stride()}: rows must be contiguous")
    if scale <= 0 or soft_cap < 0:
        raise ValueError(f"scale {scale} must be above 0, soft_cap {soft_cap} at least 0")


def _check_scales(cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> bool:
    """True if each KV head has its own scales. Raises ValueError if they don't fit the cache."""
    if cache.dtype is not torch.float8_e4m3fn:
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"k_scale and v_scale are for a cache of float8_e4m3fn, not of {cache.dtype}")
        return False
    if k_scale is None or v_scale is None:
        raise ValueError("a cache of float8_e4m3fn needs k_scale and v_scale")
    num_kv_heads = cache.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype is not torch.float32 or tuple(scale.shape) not in ((1,), (num_kv_heads,)):
            raise ValueError(
                f"{name} is {scale.dtype} {tuple(scale.shape)}; expected float32 [1], or [{num_kv_heads}], one a head"
            )
    if k_scale.shape != v_scale.shape:
        raise ValueError(f"k_scale has {len(k_scale)} numbers and v_scale {len(v_scale)}: both need 1, or one a head")
    return k_scale.numel() > 1


__all__ = ["AttentionSchedule", "paged_attention"]
