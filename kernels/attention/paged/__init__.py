"""Plans (kernels.attention.plan) of causal grouped-query attention over a KV cache in blocks (arXiv 2309.06180)."""

from functools import partial

import torch

from kernels.attention.paged.native import NativeAttentionPlan
from kernels.attention.paged.torch_cpu import TorchAttentionPlan
from kernels.attention.plan import Planner, TritonPlan
from kernels.backend import Backend
from kernels.kv_cache.layout import HeadShape, KVScales


class AttentionPlanner(Planner):
    """A planner for layers that share one window and one attention chunk."""

    def __init__(self, backend: Backend, heads: HeadShape, window: int = 0, attention_chunk: int = 0) -> None:
        """window: tokens that a query sees, itself included; 0: all before it. attention_chunk: positions are cut into
        chunks of this size, and a query sees only its own chunk; 0: no chunks."""
        native = backend.native
        super().__init__(
            None if native is None else NativeAttentionPlan(native, heads, window, attention_chunk),
            partial(TorchAttentionPlan.build, heads=heads, window=window, attention_chunk=attention_chunk),
        )


class TritonAttentionPlan(TritonPlan):
    """A GPU plan for layers that share one window and one attention chunk."""

    def __init__(
        self,
        backend: Backend,
        heads: HeadShape,
        window: int,
        attention_chunk: int,
        *,
        max_num_seqs: int,
        max_context_len: int,
        most_queries: int = 1,
    ) -> None:
        """window, attention_chunk: as in `AttentionPlanner`. most_queries: of a row that decodes, 1 and its drafts.
        Raises ValueError for head shapes that the kernels don't support."""
        from kernels.attention.paged.triton import AttentionSchedule, paged_attention  # imports Triton

        assert backend.gpu is not None
        schedule = AttentionSchedule(
            heads,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=backend.kv_cache_dtype,
            device=backend.device,
            window=window,
            attention_chunk=attention_chunk,
            batch_invariant=backend.gpu.batch_invariant,
            most_queries=most_queries,
        )
        super().__init__(schedule)
        self._attention = partial(paged_attention, schedule=schedule)

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
        """See AttentionPlan. Queries of padding get zeros, or stay as they are in `out`."""
        return self._attention(
            q_THD,
            cache,
            **self._step,  # pyright: ignore[reportArgumentType] - as `update` made it
            max_query_len=self._max_query_len,
            has_decodes=self._has_decodes,
            may_split=self._may_split,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks_H,
            k_scale=None if kv_scales is None else kv_scales.k,
            v_scale=None if kv_scales is None else kv_scales.v,
            out=out,
        )


__all__ = ["AttentionPlanner", "TritonAttentionPlan"]
