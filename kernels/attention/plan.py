"""What paged and latent attention share: a plan holds what a step's shapes determine, is made once a step, and computes
the attention of each layer.

Legend: S rows of the batch, R permanent rows, B blocks of a row's table, T tokens, H heads, D head size.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from kernels.kv_cache.layout import KVScales

if TYPE_CHECKING:
    from kernels.attention.triton_schedule import AttentionSchedule  # imports Triton


class AttentionPlan(Protocol):
    """One step's attention, for all layers whose queries see equally far."""

    def attend(
        self,
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        """Each query's attention over its row's context, [T, H, D] in q's dtype; softmax and sums are float32.

        q_THD: of the backend's compute_dtype. cache: one layer's blocks as worker.layers.kv_cache has them, keys and
        values of this step's tokens included, with finite numbers in block 0; of the dtype and heads that the plan is
        for. out: memory that the result may be put into, contiguous. kv_scales: of a cache of e4m3, which only a GPU
        reads.
        """
        ...


class StepRows(NamedTuple):
    """The rows of one step on a CPU: row i's queries are tokens query_starts[i] : query_starts[i + 1] and the last of
    its context_lens[i] tokens."""

    query_starts: np.ndarray  # int32 [S + 1]
    context_lens: np.ndarray  # int32 [S]
    block_tables: np.ndarray  # int32 [S, any], block ids in order; rows may lie apart
    block_size: int
    cache_dtype: torch.dtype

    def fill(self, struct: Any) -> None:
        """Tells the struct of a C++ kernel, which is good as long as the arrays are."""
        query_starts, context_lens, block_tables, block_size, cache_dtype = self
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == np.int32
        assert query_starts.strides == context_lens.strides == block_tables.strides[1:] == (4,)
        struct.query_starts = query_starts.ctypes.data
        struct.context_lens = context_lens.ctypes.data
        struct.block_tables = block_tables.ctypes.data
        struct.table_stride = block_tables.strides[0] // 4
        struct.block_size = block_size
        struct.bf16_cache = cache_dtype is torch.bfloat16


class NativePlan(AttentionPlan, Protocol):
    """A plan of C++ kernels, in memory that stays where it is."""

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """See `Planner.reserve`."""
        ...

    def update(self, step: StepRows) -> None:
        """From here on it is the plan of this step."""
        ...


class Planner:
    """Plans step after step on a CPU; on a GPU a `TritonPlan` is updated."""

    def __init__(self, native: NativePlan | None, plan_in_torch: Callable[[StepRows], AttentionPlan]) -> None:
        self._native, self._plan_in_torch = native, plan_in_torch

    def reserve(self, *, num_queries: int, num_rows: int, context: int) -> None:
        """Makes room for steps of so many queries and rows, each after a context of so many tokens at most: a recording
        that holds the making of a plan can then be replayed for any of them."""
        if self._native is not None:
            self._native.reserve(num_queries=num_queries, num_rows=num_rows, context=context)

    def plan(self, step: StepRows) -> AttentionPlan:
        """A plan that is good until the next one is made."""
        if self._native is None:
            return self._plan_in_torch(step)
        self._native.update(step)
        return self._native


class TritonPlan:
    """The attention of one step after the other on a GPU, in memory that stays where it is: a captured graph holds it
    for all steps."""

    def __init__(self, schedule: "AttentionSchedule") -> None:
        self._schedule = schedule
        self._step: dict[str, torch.Tensor] = {}
        self._max_query_len = 0

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
        }
        self._max_query_len = max_query_len
