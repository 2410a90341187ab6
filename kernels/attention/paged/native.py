"""Paged attention by the C++ kernel, cpp/attention.h and cpp/tile.h; cpp/work.h lists the items of a step.

Legend: S rows.
"""

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch

from kernels.attention.plan import StepRows
from kernels.kv_cache.layout import HeadShape, KVScales
from kernels.native.library import NativeKernels

# kSegment of cpp/step.h: the most keys that one item of a decode reads, so that several threads share a long
# context.
SEGMENT = 512
# Query heads of an item. 6 fill the registers; 4 times as many share a chunk of keys in L1.
ROWS_PER_TILE = 24
# The number of int32 in an item, a split and a sharer.
_ITEM, _SPLIT, _SHARER = 6, 4, 2


class AttentionStepStruct(ctypes.Structure):
    """`AttentionStep` of kernels/attention/paged/cpp/step.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("items", c_void_p),
        ("splits", c_void_p),
        ("sharers", c_void_p),
        ("table_stride", c_int64),
        ("num_items", c_int64),
        ("num_splits", c_int64),
        ("num_partials", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("attention_chunk", c_int32),
        ("cache_type", c_int32),
    )


class NativeAttentionPlan:
    """The plan of the C++ kernel, updated in place for each step: addresses in a recording stay valid."""

    def __init__(self, kernels: NativeKernels, heads: HeadShape, window: int, attention_chunk: int) -> None:
        assert heads.head_size % 8 == 0
        self._kernels = kernels
        self._struct = AttentionStepStruct(
            heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            window=window,
            attention_chunk=attention_chunk,
        )
        # Keeps alive what the struct points to.
        self._step: StepRows | None = None
        self._items, self._splits, self._sharers = (np.empty(0, np.int32) for _ in range(3))

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """See `Planner.reserve`."""
        # Memory that is never written costs nothing. For these bounds see cpp/work.h.
        num_segments = context // SEGMENT
        num_items = num_queries + num_rows * (1 + num_segments)
        if num_items * _ITEM > len(self._items):
            self._items = np.empty(num_items * _ITEM, np.int32)
            self._struct.items = self._items.ctypes.data
        if num_rows * _SPLIT > len(self._splits):
            self._splits = np.empty(num_rows * _SPLIT, np.int32)
            self._struct.splits = self._splits.ctypes.data
        num_sharers = min(num_queries, num_rows * 2 * ROWS_PER_TILE) * num_segments
        if num_sharers * _SHARER > len(self._sharers):
            self._sharers = np.empty(num_sharers * _SHARER, np.int32)
            self._struct.sharers = self._sharers.ctypes.data

    def update(self, step: StepRows) -> None:
        """Makes this the plan of `step`."""
        num_tokens, num_rows = int(step.query_starts[-1]), len(step.context_lens)
        self.reserve(num_queries=num_tokens, num_rows=num_rows, context=step.block_tables.shape[1] * step.block_size)
        self._step = step
        assert step.block_size >= 8
        assert step.block_size.bit_count() == 1
        step.fill(self._struct)
        self._kernels.plan_attention(ctypes.addressof(self._struct), num_tokens, ROWS_PER_TILE)

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
        soft_cap: float = 0.0,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_H is None or (sinks_H.dtype, sinks_H.shape) == (torch.float32, q_THD.shape[1:2])
        assert q_THD.dtype is torch.float32
        assert q_THD.stride()[1:] == (q_THD.shape[2], 1)
        out_THD = torch.empty(q_THD.shape) if out is None else out
        assert out_THD.shape == q_THD.shape
        assert out_THD.is_contiguous()
        k_scale, v_scale = (1.0, 1.0) if kv_scales is None else (kv_scales.k.item(), kv_scales.v.item())
        self._kernels.attention(
            ctypes.addressof(self._struct),
            q_THD.data_ptr(),
            q_THD.stride(0),
            cache.data_ptr(),
            scale * k_scale,
            soft_cap,
            None if sinks_H is None else sinks_H.data_ptr(),
            v_scale,
            out_THD.data_ptr(),
        )
        return out_THD
