"""Multi-head latent attention on a GPU (DeepSeek-V2, arXiv 2405.04434), with weights absorbed: heads share the cache.

Legend: T tokens, S rows, H heads, L latent size, R rope size; the cache as kernels.mla_attention.gpu_cache has it.
"""

import torch

from kernels.mla_attention.gpu_cache import check_mla_cache, check_mla_scale
from kernels.mla_attention.gpu_decode import mla_decode_kernel
from kernels.mla_attention.gpu_schedule import MlaSchedule
from kernels.mla_attention.shape import LatentShape
from kernels.paged_attention.gpu_cache import kernel_view
from kernels.paged_attention.gpu_decode import reduce_kernel
from kernels.paged_attention.gpu_softmax import LOG2E

# Programs of the reduction for each one that reads contexts: a warp each, which waits for memory most of the time.
_REDUCTIONS_PER_PROGRAM = 8


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q . (latent | rope)) @ latent of each query over its row's context, [T, H, L] in q's dtype;
    softmax and sums are float32.

    Row i's queries are tokens query_starts[i] : query_starts[i + 1], and the last of its context_lens[i] tokens, whose
    entries are in the cache. Nothing else of the cache is read. Rows of no queries are skipped; a row whose context is
    0 (padding of a captured graph) gets zeros; tokens from query_starts[-1] on stay as they are in `out`.

    For decodes, drafts and short chunks. Long prompts work, tile by tile, but each product takes L + R numbers here:
    a model computes them in less time with keys and values expanded, by kernels.paged_attention.

    q_THE: bf16, fp16 or fp32, E = L + R: what was multiplied with the absorbed key weight, then the part turned by
    rope; heads are contiguous, tokens may be any stride apart.
    query_starts: int32 [S + 1]. context_lens: int32 [S]. block_tables: int32 [S, any], block ids in order.
    table_rows: int32 [S]; row i's blocks are block_tables[table_rows[i]], so that tables of permanent rows stay where
    they are; -1 for padding, which has no table to read. None: block_tables[i].
    scale: of products of queries and entries, above 0; of the expanded head size, (128 + 64) ** -0.5 for DeepSeek.
    schedule: made for this step by `MlaSchedule.update`. kv_scale: float32 [1], of a cache of e4m3.

    Raises ValueError for shapes, dtypes and layouts that differ from these.
    """
    shape, tiles = schedule.shape, schedule.decode
    _check(q_THE, cache, schedule, block_tables, scale)
    check_mla_scale(cache, kv_scale)
    if table_rows is not None and (table_rows.shape != context_lens.shape or table_rows.dtype is not torch.int32):
        raise ValueError(
            f"table_rows is {table_rows.dtype} {tuple(table_rows.shape)}: torch.int32 {tuple(context_lens.shape)}, one "
            "for each context, is due"
        )
    out_shape = (len(q_THE), shape.num_heads, shape.latent_size)
    out_THL = torch.empty(out_shape, dtype=q_THE.dtype, device=q_THE.device) if out is None else out
    if out_THL.shape != out_shape or out_THL.stride()[1:] != (shape.latent_size, 1):
        raise ValueError(
            f"out of shape {tuple(out_THL.shape)}, strides {out_THL.stride()}: {out_shape} is due, heads contiguous"
        )

    num_rows, starts, groups = len(context_lens), schedule.starts, schedule.heads
    partials = (schedule.partial_sums, schedule.partial_values)
    mla_decode_kernel[(schedule.num_programs,)](
        q_THE, kernel_view(cache), out_THL, query_starts, context_lens, block_tables, table_rows, starts, *partials,
        schedule.own_values, kv_scale, scale * LOG2E.value,
        num_rows, q_THE.stride(0), out_THL.stride(0), block_tables.stride(0), starts.stride(0),
        HEAD_GROUPS=groups.num_kv_heads, GROUP=groups.group_size, LATENT=shape.latent_size, ROPE=shape.rope_size,
        BLOCK_SIZE=cache.shape[1], LANES=tiles.lanes, TOKENS=tiles.tokens, CHUNK=schedule.chunk,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if schedule.num_partials:
        reduce_kernel[(min(len(q_THE) * shape.num_heads, schedule.num_programs * _REDUCTIONS_PER_PROGRAM),)](
            out_THL, query_starts, starts, *partials, None, kv_scale,
            num_rows, out_THL.stride(0), starts.stride(0),
            KV_HEADS=groups.num_kv_heads, GROUP=groups.group_size, D=shape.latent_size, D_PADDED=shape.latent_size,
            SCALE_PER_HEAD=False, num_warps=1, num_stages=4,
        )  # fmt: skip
    return out_THL


def _check(
    q_THE: torch.Tensor, cache: torch.Tensor, schedule: MlaSchedule, block_tables: torch.Tensor, scale: float
) -> None:
    shape = schedule.shape
    check_mla_cache(cache, shape.entry_size)
    if q_THE.shape[1:] != (shape.num_heads, shape.entry_size) or q_THE.stride()[1:] != (shape.entry_size, 1):
        raise ValueError(
            f"q of shape {tuple(q_THE.shape)}, strides {q_THE.stride()}: [tokens, {shape.num_heads}, "
            f"{shape.entry_size}], heads contiguous, is due for {shape}"
        )
    if cache.dtype is not schedule.cache_dtype:
        raise ValueError(f"the cache is of {cache.dtype}, the schedule for {schedule.cache_dtype}")
    if cache.dtype.itemsize > q_THE.dtype.itemsize:
        raise ValueError(f"a cache of {cache.dtype} is wider than queries of {q_THE.dtype}")
    if block_tables.stride(1) != 1:
        raise ValueError(f"block tables of strides {block_tables.stride()}: rows have to be contiguous")
    if scale <= 0:
        raise ValueError(f"scale {scale} has to be above 0")


__all__ = ["LatentShape", "MlaSchedule", "mla_attention"]
