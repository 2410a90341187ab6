"""Paged attention by the C++ kernel, attention.h beside this file: the list of what there is to do in a step.

Legend: S rows, I items, C columns of an item or a split.
"""

import ctypes

import numpy as np
import torch

from kernels.native.library import AttentionStepStruct, NativeKernels
from kernels.paged_attention.heads import HeadShape

# kSegment of attention.h: the keys that one item of a decode reads at most, so that a long context is dealt out to
# several threads.
SEGMENT = 512
# Query heads of a tile. 6 fill the registers; some tiles of 6 share a chunk of keys that is in L1.
ROWS_PER_TILE = 24


class NativeAttentionPlan:
    """One step's attention. Arrays are held here for the addresses in the struct."""

    def __init__(
        self,
        kernels: NativeKernels,
        *,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
        heads: HeadShape,
        window: int = 0,
    ) -> None:
        """Arguments as of `plan_attention`."""
        assert block_size in (8, 16, 32)
        assert heads.head_size % 8 == 0
        self._kernels = kernels
        items_IC, splits_SC, num_partials = _work(query_starts, context_lens, heads, window)
        arrays = [np.ascontiguousarray(array, np.int32) for array in
            (query_starts, context_lens, block_tables, items_IC, splits_SC)]  # fmt: skip
        partial_size = heads.num_heads * (heads.head_size + 2)
        partials = torch.empty(num_partials * partial_size)
        self._held = (arrays, partials)
        starts, lens, tables, items, splits = (array.ctypes.data for array in arrays)
        self._struct = AttentionStepStruct(
            query_starts=starts,
            context_lens=lens,
            block_tables=tables,
            items=items,
            splits=splits,
            partials=partials.data_ptr(),
            table_stride=block_tables.shape[1],
            num_items=len(items_IC),
            num_splits=len(splits_SC),
            heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            block_size=block_size,
            window=window,
            bf16_cache=cache_dtype is torch.bfloat16,
        )

    def attend(self, q_THD: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
        assert q_THD.dtype is torch.float32
        assert q_THD.stride()[1:] == (q_THD.shape[2], 1)
        out_THD = torch.empty(q_THD.shape)
        self._kernels.attention(
            ctypes.addressof(self._struct), q_THD.data_ptr(), q_THD.stride(0), cache.data_ptr(), scale,
            out_THD.data_ptr(),
        )  # fmt: skip
        return out_THD


def _work(
    query_starts: np.ndarray, context_lens: np.ndarray, heads: HeadShape, window: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Items [I, 6] and splits [., 3], as attention.h has them, and the number of partial results.

    A row of several queries is cut into tiles; a row of one query, if its context is longer than a segment, into its
    segments, whose results are put together afterwards: a split.
    """
    queries_per_tile = max(1, ROWS_PER_TILE // heads.group_size)
    query_lens_S = np.diff(query_starts).astype(np.int64)
    first_positions_S = context_lens.astype(np.int64) - query_lens_S

    def first_segment(positions: np.ndarray) -> np.ndarray:
        return np.maximum(positions - window + 1, 0) // SEGMENT if window else np.zeros_like(positions)

    num_segments_S = -(-context_lens.astype(np.int64) // SEGMENT) - first_segment(first_positions_S)
    is_split_S = (query_lens_S == 1) & (num_segments_S > 1)
    counts_S = np.where(is_split_S, num_segments_S, -(-query_lens_S // queries_per_tile))
    rows_I = np.repeat(np.arange(len(counts_S)), counts_S)
    nth_I = np.arange(len(rows_I)) - np.repeat(counts_S.cumsum() - counts_S, counts_S)
    is_split_I = is_split_S[rows_I]
    first_queries_I = np.where(is_split_I, 0, nth_I * queries_per_tile)
    num_queries_I = np.minimum(query_lens_S[rows_I] - first_queries_I, queries_per_tile)
    positions_I = first_positions_S[rows_I] + first_queries_I
    segments_I = first_segment(positions_I) + np.where(is_split_I, nth_I, 0)
    end_segments_I = np.where(is_split_I, segments_I + 1, -(-(positions_I + num_queries_I) // SEGMENT))
    partials_I = np.where(is_split_I, is_split_I.cumsum() - 1, -1)
    items_IC = np.stack((rows_I, first_queries_I, num_queries_I, segments_I, end_segments_I, partials_I), axis=1)
    # Long ones first: threads then end together.
    costs_I = num_queries_I * np.minimum((end_segments_I - segments_I) * SEGMENT, positions_I + num_queries_I)
    items_IC = items_IC[np.argsort(-costs_I, kind="stable")]

    split_rows = np.flatnonzero(is_split_S)
    numbers = num_segments_S[split_rows]
    splits_SC = np.stack((split_rows, numbers.cumsum() - numbers, numbers), axis=1)
    return items_IC, splits_SC, int(numbers.sum())
