"""MLA by the Triton kernels, gpu.py beside this file: what a step's shapes determine is decided on the GPU.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table.
"""

import torch

from kernels.compute_path import ComputePath
from kernels.mla_attention.shape import LatentShape
from kernels.paged_attention.kv_scales import KVScales


class TritonMlaPlan:
    """The attention of one step after the other, in memory that stays where it is: a captured graph holds it for all
    steps."""

    def __init__(self, path: ComputePath, shape: LatentShape, *, max_num_seqs: int, max_context_len: int) -> None:
        """Raises ValueError for sizes that the kernels don't know."""
        from kernels.mla_attention.gpu_schedule import MlaSchedule  # imports Triton

        self._schedule = MlaSchedule(
            shape,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=path.kv_cache_dtype,
            device=path.device,
        )
        self._step: dict[str, torch.Tensor] = {}

    def update(
        self,
        *,
        query_starts: torch.Tensor,
        context_lens_S: torch.Tensor,
        block_tables_RB: torch.Tensor,
        rows_S: torch.Tensor,
        max_query_len: int,
    ) -> None:
        """From here on it is the plan of another step; arguments as of
        kernels.paged_attention.triton_plan.TritonAttentionPlan."""
        self._schedule.update(query_starts, context_lens_S)
        self._step = {
            "query_starts": query_starts,
            "context_lens": context_lens_S,
            "block_tables": block_tables_RB,
            "table_rows": rows_S,
        }

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        """What kernels.mla_attention.gpu.mla_attention promises; queries of padding get zeros, or stay as they are in
        `out`. kv_scales: of a cache of e4m3, whose one scale is that of keys."""
        from kernels.mla_attention.gpu import mla_attention

        kv_scale = None if kv_scales is None else kv_scales.k
        return mla_attention(
            q_THD, cache, **self._step, scale=scale, schedule=self._schedule, kv_scale=kv_scale, out=out
        )
