"""Paged attention by the Triton kernels, gpu.py beside this file: what a step's shapes determine is decided on the GPU.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.paged_attention.heads import HeadShape
from kernels.paged_attention.kv_scales import KVScales


class TritonAttentionPlan:
    """The attention of one step after the other, for the layers whose queries see equally far, in memory that stays
    where it is: a captured graph holds it for all steps."""

    def __init__(
        self,
        path: ComputePath,
        heads: HeadShape,
        window: int,
        attention_chunk: int,
        *,
        max_num_seqs: int,
        max_context_len: int,
    ) -> None:
        """window, attention_chunk: as of `AttentionPlanner`. Raises ValueError for head shapes that the kernels don't
        know."""
        from kernels.paged_attention.gpu_schedule import AttentionSchedule  # imports Triton

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
        """What kernels.paged_attention.paged_attention promises; queries of padding get zeros, or stay as they are in
        `out`."""
        from kernels.paged_attention.gpu import paged_attention

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
