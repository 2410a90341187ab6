"""Causal grouped-query attention over a KV cache in blocks (arXiv 2309.06180).

A plan holds what a step's shapes determine, and is made once a step by `plan_attention`; `paged_attention` is called
by each layer.
"""

from typing import Protocol

import numpy as np
import torch

from kernels.compute_path import ComputePath
from kernels.paged_attention.heads import HeadShape
from kernels.paged_attention.native import NativeAttentionPlan
from kernels.paged_attention.torch_plan import TorchAttentionPlan


class AttentionPlan(Protocol):
    """One step's attention, for all layers of one sliding window."""

    def attend(self, q_THD: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
        """What `paged_attention` promises."""
        ...


def plan_attention(
    path: ComputePath,
    *,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    cache_dtype: torch.dtype,
    heads: HeadShape,
    window: int = 0,
) -> AttentionPlan:
    """Row i's queries are tokens query_starts[i] : query_starts[i + 1] and the last of its context_lens[i] tokens.

    query_starts: int [S + 1]. context_lens: int [S]. block_tables: int [S, any], block ids in order. window: tokens
    that a query sees, itself included; 0: all before it.
    """
    step = {
        "query_starts": query_starts,
        "context_lens": context_lens,
        "block_tables": block_tables,
        "block_size": block_size,
        "cache_dtype": cache_dtype,
        "heads": heads,
        "window": window,
    }
    return TorchAttentionPlan.build(**step) if path.native is None else NativeAttentionPlan(path.native, **step)


def paged_attention(q_THD: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

    q_THD: of the path's compute_dtype. cache: one layer's blocks as worker.kv_cache has them, keys and values of this
    step's tokens included, with finite numbers in block 0. plan: of this step, for the cache's dtype and head shape.
    """
    return plan.attend(q_THD, cache, scale)


__all__ = ["AttentionPlan", "HeadShape", "paged_attention", "plan_attention"]
