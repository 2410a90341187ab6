"""Plans of MLA on a CPU, as kernels.paged_attention makes them for keys and values of each head."""

import numpy as np
import torch

from kernels.compute_path import ComputePath
from kernels.mla_attention.native import NativeMlaPlan
from kernels.mla_attention.shape import LatentShape
from kernels.mla_attention.torch_plan import TorchMlaPlan
from kernels.paged_attention import AttentionPlan


class MlaPlanner:
    """Plans step after step; on a GPU triton_plan.TritonMlaPlan does."""

    def __init__(self, path: ComputePath, shape: LatentShape) -> None:
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
        """A plan that is good until the next one is made; arguments as of kernels.paged_attention.AttentionPlanner.
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
