"""Attention plans, shared by paged and latent attention: a plan is made once per step from the step's shapes, and
computes the attention of each layer.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table, T tokens, H heads, D head size.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from kernels.kv_cache.layout import CPU_CACHE_TYPES, KVScales

if TYPE_CHECKING:
    from kernels.attention.triton_schedule import AttentionSchedule  # imports Triton


class AttentionPlan(Protocol):
    """One step's attention, for all layers that share one window and one attention chunk."""

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
        """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

        q_THD: in the backend's compute_dtype. cache: one layer's blocks in the layout of worker.layers.kv_cache, with
        the dtype and heads of the plan; it already holds the keys and values of this step's tokens, and finite numbers
        in block 0. out: contiguous memory that may receive the result. kv_scales: the scales of an e4m3 cache, which
        only a GPU reads. soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: no cap. sinks_H: float32,
        contiguous, scores that join each head's softmax without a value (arXiv 2309.17453); as long as a recording of
        the call is replayed, the caller keeps them. Not for latent attention.
        """
        ...


class StepRows(NamedTuple):
    """The rows of one step on a CPU: row i's queries are tokens query_starts[i] : query_starts[i + 1] and the last of
    its context_lens[i] tokens."""

    query_starts: np.ndarray  # int32 [S + 1]
    context_lens: np.ndarray  # int32 [S]
    block_tables: np.ndarray  # int32 [S, any], block ids in order; any row stride
    block_size: int
    cache_dtype: torch.dtype

    def fill(self, struct: Any) -> None:
        """Fills the struct of a C++ kernel; the struct is valid as long as the arrays live."""
        query_starts, context_lens, block_tables, block_size, cache_dtype = self
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == np.int32
        assert query_starts.strides == context_lens.strides == block_tables.strides[1:] == (4,)
        struct.query_starts = query_starts.ctypes.data
        struct.context_lens = context_lens.ctypes.data
        struct.block_tables = block_tables.ctypes.data
        struct.table_stride = block_tables.strides[0] // 4
        struct.block_size = block_size
        struct.cache_type = CPU_CACHE_TYPES[cache_dtype]


class NativePlan(AttentionPlan, Protocol):
    """A plan for C++ kernels, updated in place: its memory never moves."""

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """See `Planner.reserve`."""
        ...

    def update(self, step: StepRows) -> None:
        """Makes this the plan of `step`."""
        ...


class Planner:
    """Makes a plan for each step on a CPU. On a GPU, a `TritonPlan` is updated instead."""

    def __init__(self, native: NativePlan | None, plan_in_torch: Callable[[StepRows], AttentionPlan]) -> None:
        self._native, self._plan_in_torch = native, plan_in_torch

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """Reserves memory for steps of up to num_queries queries, num_rows rows and context tokens per row, so that a
        recording that includes the making of a plan can be replayed for any such step."""
        if self._native is not None:
            self._native.reserve(num_queries=num_queries, num_rows=num_rows, context=context)

    def plan(self, step: StepRows) -> AttentionPlan:
        """Returns a plan that is valid until the next call."""
        if self._native is None:
            return self._plan_in_torch(step)
        self._native.update(step)
        return self._native


class HostRows(NamedTuple):
    """The rows of a step on a GPU as far as the host knows them: int32 [S] each."""

    query_lens: np.ndarray
    context_lens: np.ndarray


class TritonPlan:
    """The attention plan of a GPU, updated in place for each step: its memory never moves, so a captured graph can hold
    it for all steps."""

    def __init__(self, schedule: "AttentionSchedule") -> None:
        self._schedule = schedule
        self._step: dict[str, torch.Tensor] = {}
        # The arguments that save launches: see paged_attention and mla_attention.
        self._max_query_len, self._has_decodes, self._may_split = 0, True, True

    def update(
        self,
        *,
        query_starts: torch.Tensor,
        context_lens_S: torch.Tensor,
        block_tables_RB: torch.Tensor,
        rows_S: torch.Tensor,
        max_query_len: int,
        host_rows: HostRows | None = None,
    ) -> None:
        """Makes this the plan of another step. Row i's queries are tokens query_starts[i] : query_starts[i + 1], the
        last of its context_lens_S[i] tokens, and its blocks are block_tables_RB[rows_S[i]]; a context of 0 is padding.
        All int32. max_query_len: an upper bound of the queries per row. host_rows: the same rows, so that kernels
        without work are not launched; None in a graph, which serves other steps."""
        self._schedule.update(query_starts, context_lens_S)
        self._step = {
            "query_starts": query_starts,
            "context_lens": context_lens_S,
            "block_tables": block_tables_RB,
            "table_rows": rows_S,
        }
        self._max_query_len, self._has_decodes, self._may_split = max_query_len, True, True
        if host_rows is not None:
            self._has_decodes, self._may_split = self._schedule.decodes_of(*host_rows)
