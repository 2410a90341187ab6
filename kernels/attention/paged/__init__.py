"""Causal grouped-query attention over a KV cache in blocks (arXiv 2309.06180).

A plan holds what a step's shapes determine and is made once a step, on a CPU by `AttentionPlanner`, on a GPU by
`TritonAttentionPlan`; each layer calls `paged_attention`.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table, T tokens, H heads, D head size.
"""

from typing import Protocol

import numpy as np
import torch

from kernels.attention.paged.native import NativeAttentionPlan
from kernels.attention.paged.torch_cpu import TorchAttentionPlan
from kernels.backend import Backend
from kernels.kv_cache.layout import HeadShape, KVScales


class TritonAttentionPlan:
    """The attention of one step after the other, for the layers whose queries see equally far, in memory that stays
    where it is: a captured graph holds it for all steps."""

    def __init__(
        self,
        path: Backend,
        heads: HeadShape,
        window: int,
        attention_chunk: int,
        *,
        max_num_seqs: int,
        max_context_len: int,
    ) -> None:
        """window, attention_chunk: as of `AttentionPlanner`. Raises ValueError for head shapes that the kernels don't
        know."""
        from kernels.attention.triton_schedule import AttentionSchedule  # imports Triton

        assert path.gpu is not None
        self._schedule = AttentionSchedule(
            heads,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=path.kv_cache_dtype,
            device=path.device,
            window=window,
            attention_chunk=attention_chunk,
            batch_invariant=path.gpu.batch_invariant,
        )
        self._step: dict[str, torch.Tensor | int] = {}

    def update(
        self,
        *,
        query_starts: torch.Tensor,
        context_lens_S: torch.Tensor,
        block_tables_RB: torch.Tensor,
        rows_S: torch.Tensor,
        max_query_len: int,
    ) -> None:
        """From here on it is the plan of another step. Row i's queries are tokens query_starts[i] : query_starts[i + 1]
        and the last of its context_lens_S[i] tokens, whose blocks are block_tables_RB[rows_S[i]]; a context of 0 is
        padding. All int32. max_query_len: no row has more."""
        self._schedule.update(query_starts, context_lens_S)
        self._step = {
            "query_starts": query_starts,
            "context_lens": context_lens_S,
            "block_tables": block_tables_RB,
            "table_rows": rows_S,
            "max_query_len": max_query_len,
        }

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        """What kernels.attention.paged.paged_attention promises; queries of padding get zeros, or stay as they are in
        `out`."""
        from kernels.attention.paged.triton import paged_attention

        return paged_attention(
            q_THD,
            cache,
            **self._step,  # pyright: ignore[reportArgumentType] - as `update` made it
            scale=scale,
            schedule=self._schedule,
            k_scale=None if kv_scales is None else kv_scales.k,
            v_scale=None if kv_scales is None else kv_scales.v,
            out=out,
        )


class AttentionPlan(Protocol):
    """One step's attention, for all layers whose queries see equally far."""

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None,
        kv_scales: KVScales | None,
    ) -> torch.Tensor:
        """What `paged_attention` promises."""
        ...


class AttentionPlanner:
    """Plans step after step on a CPU, for the layers whose queries see equally far; on a GPU
    triton_plan.TritonAttentionPlan does."""

    def __init__(self, path: Backend, heads: HeadShape, window: int = 0, attention_chunk: int = 0) -> None:
        """window: tokens that a query sees, itself included; 0: all before it. attention_chunk: positions are cut into
        chunks of so many, and a query sees none but its own; 0: they are not."""
        self._heads, self._window, self._attention_chunk = heads, window, attention_chunk
        native = path.native
        self._native = None if native is None else NativeAttentionPlan(native, heads, window, attention_chunk)

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """Makes room for steps of so many queries and rows, each after a context of so many tokens at most: a recording
        that holds the making of a plan can then be replayed for any of them."""
        if self._native is not None:
            self._native.reserve(num_queries=num_queries, num_rows=num_rows, context=context)

    def plan(
        self,
        *,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> AttentionPlan:
        """A plan that is good until the next one is made.

        Row i's queries are tokens query_starts[i] : query_starts[i + 1] and the last of its context_lens[i] tokens.
        query_starts: int32 [S + 1]. context_lens: int32 [S]. block_tables: int32 [S, any], block ids in order.
        """
        step = {
            "query_starts": query_starts,
            "context_lens": context_lens,
            "block_tables": block_tables,
            "block_size": block_size,
            "cache_dtype": cache_dtype,
        }
        if self._native is None:
            return TorchAttentionPlan.build(
                **step, heads=self._heads, window=self._window, attention_chunk=self._attention_chunk
            )
        self._native.update(**step)
        return self._native


def plan_attention(
    path: Backend,
    *,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    cache_dtype: torch.dtype,
    heads: HeadShape,
    window: int = 0,
    attention_chunk: int = 0,
) -> AttentionPlan:
    """The plan of a single step; see `AttentionPlanner`."""
    return AttentionPlanner(path, heads, window, attention_chunk).plan(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )


def paged_attention(
    q_THD: torch.Tensor,
    cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

    q_THD: of the path's compute_dtype. cache: one layer's blocks as worker.layers.kv_cache has them, keys and values of
    this step's tokens included, with finite numbers in block 0. plan: of this step, for the cache's dtype and head
    shape. out: memory that the result may be put into, contiguous. kv_scales: of a cache of e4m3, which only a GPU
    reads.
    """
    return plan.attend(q_THD, cache, scale, out, kv_scales)


__all__ = ["AttentionPlan", "AttentionPlanner", "HeadShape", "KVScales", "paged_attention", "plan_attention"]
