"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) with absorbed weights: plans, as
kernels.attention.paged has them.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table.
"""

import numpy as np
import torch

from kernels.attention.latent.native import NativeMlaPlan
from kernels.attention.latent.torch_cpu import TorchMlaPlan
from kernels.attention.paged import AttentionPlan
from kernels.backend import Backend
from kernels.kv_cache.layout import KVScales, LatentShape


class TritonMlaPlan:
    """The attention of one step after the other, in memory that stays where it is: a captured graph holds it for all
    steps."""

    def __init__(self, path: Backend, shape: LatentShape, *, max_num_seqs: int, max_context_len: int) -> None:
        """Raises ValueError for sizes that the kernels don't know."""
        from kernels.attention.latent.triton_schedule import MlaSchedule  # imports Triton

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
        kernels.attention.paged.TritonAttentionPlan."""
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
        """What kernels.attention.latent.triton.mla_attention promises; queries of padding get zeros, or stay as they
        are in `out`. kv_scales: of a cache of e4m3, whose one scale is that of keys."""
        from kernels.attention.latent.triton import mla_attention

        kv_scale = None if kv_scales is None else kv_scales.k
        return mla_attention(
            q_THD, cache, **self._step, scale=scale, schedule=self._schedule, kv_scale=kv_scale, out=out
        )


class MlaPlanner:
    """Plans step after step; on a GPU triton_plan.TritonMlaPlan does."""

    def __init__(self, path: Backend, shape: LatentShape) -> None:
        self._shape = shape
        self._native = None if path.native is None else NativeMlaPlan(path.native, shape)

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """Nothing is to be: steps of models with MLA are not recorded."""

    def plan(
        self,
        *,
        query_starts: np.ndarray,
        context_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> AttentionPlan:
        """A plan that is good until the next one is made; arguments as of kernels.attention.paged.AttentionPlanner.
        Queries are [T, H, L + R], the result is [T, H, L]; the cache is [blocks, block size, L + R]."""
        step = {
            "query_starts": query_starts,
            "context_lens": context_lens,
            "block_tables": block_tables,
            "block_size": block_size,
        }
        if self._native is None:
            return TorchMlaPlan(self._shape, **step)
        self._native.update(**step, cache_dtype=cache_dtype)
        return self._native
