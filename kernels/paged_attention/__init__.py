"""Causal grouped-query attention over a KV cache in blocks (arXiv 2309.06180).

`AttentionPlan` holds what a step's shapes determine, and is made once a step; `paged_attention` is called by each
layer.
"""

from kernels.paged_attention.cpu import paged_attention
from kernels.paged_attention.plan import AttentionPlan, HeadShape

__all__ = ["AttentionPlan", "HeadShape", "paged_attention"]
