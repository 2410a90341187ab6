"""The batch of one step, the input of models, built from the rows without a Python loop.

Shape suffixes: D replicas, R permanent rows, S scheduled rows, T tokens, B blocks of a row's table, L positions
whose logits are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.attention.plan import HostRows
from worker.step.inputs import BatchRows, Scheduled
from worker.step.items import EmbeddedTokens, ItemRows

if TYPE_CHECKING:
    # Not imported at run time: rows need protobuf, and models must also work without it.
    from worker.step.rows import Rows


class InputBatch:
    """The model's input for a step on a CPU. Row i's tokens are query_starts[i] : query_starts[i + 1] of the T axis.

    The arrays keep their addresses from step to step, so kernel calls recorded with them are valid in all steps.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, max_blocks: int, has_axes: bool = False) -> None:
        """max_blocks: the most blocks of a row. has_axes: the model's positions have three axes (M-RoPE)."""
        self.max_tokens, self.max_rows, self.max_blocks = max_tokens, max_rows, max_blocks
        # Entries of the arrays that this step uses. Pages of the arrays cost memory only once they are written.
        self.num_tokens = self.num_rows = self.num_blocks = 0
        # Tokens of the step at each replica that computes it, including this one; empty: there is no other replica.
        self.num_tokens_D: Sequence[int] = ()
        self.token_ids = np.zeros(max_tokens, np.int64)
        self.positions = np.zeros(max_tokens, np.int64)
        # What rope rotates by, where the axes of each token are equal.
        self.rope_positions = np.zeros(max_tokens, np.int64) if has_axes else self.positions
        # Int64 [3, T]: what rope rotates by in this step. None: rope_positions.
        self.rope_positions_AT: np.ndarray | None = None
        # Tokens that embeddings of items replace, and these embeddings [M, E]: the caller sets them on the first stage.
        self.embedded: EmbeddedTokens | None = None
        self.embeddings_ME: torch.Tensor | None = None
        self.slots = np.zeros(max_tokens, np.int64)
        self.starts = np.zeros(max_rows + 1, np.int32)
        self.context_lens = np.zeros(max_rows, np.int32)
        self.block_tables = np.zeros((max_rows, max_blocks), np.int32)
        self.logit_places = np.zeros(max_tokens, np.int64)
        self.logit_count = np.zeros(1, np.int64)

    @classmethod
    def of(
        cls,
        *,
        token_ids_T: np.ndarray | torch.Tensor,
        positions_T: np.ndarray | torch.Tensor,
        slots_T: np.ndarray | torch.Tensor,
        query_starts: np.ndarray,
        context_lens_S: np.ndarray,
        block_tables_SB: np.ndarray,
        logit_indices: np.ndarray | torch.Tensor,
    ) -> "InputBatch":
        """Makes a batch with just enough room for this step, and copies its numbers."""
        num_rows, num_blocks = block_tables_SB.shape
        batch = cls(max_tokens=len(token_ids_T), max_rows=num_rows, max_blocks=num_blocks)
        batch.fill(
            token_ids_T=np.asarray(token_ids_T),
            positions_T=np.asarray(positions_T),
            slots_T=np.asarray(slots_T),
            query_starts=query_starts,
            context_lens_S=context_lens_S,
            block_tables_SB=block_tables_SB,
            logit_indices=np.asarray(logit_indices),
        )
        return batch

    def fill(
        self,
        *,
        token_ids_T: np.ndarray,
        positions_T: np.ndarray,
        slots_T: np.ndarray,
        query_starts: np.ndarray,
        context_lens_S: np.ndarray,
        block_tables_SB: np.ndarray,
        logit_indices: np.ndarray,
    ) -> None:
        """Copies a step's numbers; see the properties of the same names."""
        self.num_tokens, self.num_logits = len(token_ids_T), len(logit_indices)
        self.num_rows, self.num_blocks = block_tables_SB.shape
        self.token_ids[: self.num_tokens] = token_ids_T
        self.positions[: self.num_tokens] = positions_T
        self.slots[: self.num_tokens] = slots_T
        self.starts[: self.num_rows + 1] = query_starts
        self.context_lens[: self.num_rows] = context_lens_S
        self.block_tables[: self.num_rows, : self.num_blocks] = block_tables_SB
        self.logit_places[: self.num_logits] = logit_indices

    @property
    def num_logits(self) -> int:
        return int(self.logit_count[0])

    @num_logits.setter
    def num_logits(self, count: int) -> None:
        self.logit_count[0] = count

    @property
    def token_ids_T(self) -> torch.Tensor:
        """int64."""
        return torch.from_numpy(self.token_ids[: self.num_tokens])

    @property
    def positions_T(self) -> torch.Tensor:
        """int64, positions within the sequence."""
        return torch.from_numpy(self.positions[: self.num_tokens])

    @property
    def rope_T(self) -> torch.Tensor:
        """int64 [T], or [3, T] (time, height, width): positions that rope rotates by."""
        if self.rope_positions_AT is not None:
            return torch.from_numpy(self.rope_positions_AT)
        return torch.from_numpy(self.rope_positions[: self.num_tokens])

    @property
    def is_special(self) -> bool:
        """True if the step makes other kernel calls than steps of text."""
        return self.embedded is not None or self.rope_positions_AT is not None

    @property
    def slots_T(self) -> torch.Tensor:
        """int64, block id * block_size + offset: where each token's KV is written."""
        return torch.from_numpy(self.slots[: self.num_tokens])

    @property
    def query_starts(self) -> np.ndarray:
        """int32 [S + 1], begins with 0."""
        return self.starts[: self.num_rows + 1]

    @property
    def context_lens_S(self) -> np.ndarray:
        """int32, tokens of each row whose KV exists after this step's writes."""
        return self.context_lens[: self.num_rows]

    @property
    def block_tables_SB(self) -> np.ndarray:
        """int32, block ids in order; entries past a row's length are 0, the null block."""
        return self.block_tables[: self.num_rows, : self.num_blocks]

    @property
    def logit_indices(self) -> torch.Tensor:
        """int64 [L], positions on the T axis."""
        return torch.from_numpy(self.logit_places[: self.num_logits])


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBatch:
    """The model's input for a step on a GPU. Row i's tokens are query_starts[i] : query_starts[i + 1] of the T axis.
    A graph's replay needs the tensors at the addresses that they had in the capture.

    Padding rows have rows_S = -1 and context length 0. Padding tokens (beyond query_starts[-1], or of padding rows)
    have token id -1, position 0 and slot -1.
    """

    token_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32, within the sequence; of rows with items, shifted as rope needs it
    slots_T: torch.Tensor  # int64, block id * block size + offset
    rows_S: torch.Tensor  # int32, indices into R
    query_starts: torch.Tensor  # int32 [S + 1]
    context_lens_S: torch.Tensor  # int32, tokens whose KV exists after this step's writes
    block_tables_RB: torch.Tensor  # int32, of all permanent rows
    # The most tokens of a row in this step.
    max_query_len: int
    # The rows as the host knows them; None in a graph, which serves other steps.
    host_rows: HostRows | None = None
    # int32 [3, T]: what rope rotates by (time, height, width). None: positions_T, on all axes.
    rope_positions_AT: torch.Tensor | None = None
    # Tokens embedded_places_M (int64) have embeddings from elsewhere, [M, E]. Never in a graph.
    embedded_places_M: torch.Tensor | None = None
    embeddings_ME: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_rows(self) -> int:
        return len(self.rows_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A step's tokens; they already count as computed in the rows."""

    query_starts: np.ndarray  # int64 [S + 1], begins with 0
    row_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64, within the sequence
    token_ids_T: np.ndarray  # int32
    context_lens_S: np.ndarray  # int64, tokens that are computed after the step
    sampling_N: np.ndarray  # int64, indices into S of the rows that sample


def gather(rows: "Rows", scheduled: Scheduled) -> Gathered:
    """Gathers the tokens that a plan computes from the rows, and counts them as computed."""
    rows_S, num_tokens_S = scheduled.rows_S, scheduled.num_tokens_S
    query_starts = np.concatenate(([0], num_tokens_S.cumsum()))
    first_positions_S = rows.num_computed_tokens_R[rows_S]
    row_T = np.repeat(rows_S, num_tokens_S)
    offsets_T = np.arange(int(query_starts[-1]))
    positions_T = np.repeat(first_positions_S - query_starts[:-1], num_tokens_S) + offsets_T
    sampling_N = rows.advance(rows_S, num_tokens_S)
    return Gathered(
        query_starts=query_starts,
        row_T=row_T,
        positions_T=positions_T,
        token_ids_T=rows.token_ids_RL[row_T, positions_T],
        context_lens_S=rows.num_computed_tokens_R[rows_S],
        sampling_N=sampling_N,
    )


def build_batch(rows: "Rows", scheduled: Scheduled, batch: InputBatch) -> BatchRows:
    """Fills the batch with what a plan computes, and counts its tokens as computed.

    logit_indices has, for each row that samples, its last token and the num_drafts tokens before it.
    """
    step, rows_S = gather(rows, scheduled), scheduled.rows_S
    block_T = rows.block_ids_RB[step.row_T, step.positions_T // rows.block_size].astype(np.int64)
    num_blocks = -(-int(step.context_lens_S.max(initial=0)) // rows.block_size)
    batch_rows = BatchRows(
        rows_S=rows_S,
        rows_N=rows_S[step.sampling_N],
        num_drafts_N=None if scheduled.num_drafts_S is None else scheduled.num_drafts_S[step.sampling_N],
    )
    logit_indices = step.query_starts[1:][step.sampling_N] - 1
    if batch_rows.num_drafts_N is not None:
        logit_indices = _with_drafts(logit_indices, batch_rows.num_drafts_N)
    batch.fill(
        token_ids_T=step.token_ids_T,
        positions_T=step.positions_T,
        slots_T=block_T * rows.block_size + step.positions_T % rows.block_size,
        query_starts=step.query_starts,
        context_lens_S=step.context_lens_S,
        block_tables_SB=rows.block_ids_RB[rows_S, :num_blocks],
        logit_indices=logit_indices,
    )
    if rows.items is not None:
        put_items(rows.items, rows_S, batch)
    return batch_rows


def put_items(items: ItemRows, rows_S: np.ndarray, batch: InputBatch) -> None:
    """Completes a batch that is otherwise filled, for a model that takes items."""
    positions_T = batch.positions[: batch.num_tokens]
    step = items.of_step(rows_S, batch.query_starts, positions_T)
    batch.embedded, batch.embeddings_ME = (None if step is None else step.embedded), None
    batch.rope_positions_AT = None if step is None else step.positions_AT
    if batch.rope_positions is batch.positions:
        return
    rope_positions_T = batch.rope_positions[: batch.num_tokens]
    if items.has_any:
        np.add(positions_T, items.shift_R[rows_S].repeat(np.diff(batch.query_starts)), out=rope_positions_T)
    else:
        rope_positions_T[:] = positions_T


def _with_drafts(last_N: np.ndarray, num_drafts_N: np.ndarray) -> np.ndarray:
    """Returns the indices of each row's last num_drafts_N + 1 tokens, in order."""
    counts_N = num_drafts_N + 1
    offsets = np.arange(counts_N.sum()) - (counts_N.cumsum() - counts_N).repeat(counts_N)
    return (last_N - num_drafts_N).repeat(counts_N) + offsets
