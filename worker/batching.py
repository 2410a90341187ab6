"""From rows to the batch of one step, without a Python loop over tokens or rows.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, B blocks of the longest row's context.
"""

from dataclasses import dataclass

import numpy as np

from worker.input_batch import InputBatch
from worker.rows import Rows
from worker.scheduled import BatchRows, Scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A step's tokens, which are counted as computed."""

    query_starts: np.ndarray  # int64 [S + 1], begins with 0
    row_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64, within the sequence
    token_ids_T: np.ndarray  # int32
    context_lens_S: np.ndarray  # int64, tokens that are computed after the step
    sampling_N: np.ndarray  # int64, indices into S of the rows that sample


def gather(rows: Rows, scheduled: Scheduled) -> Gathered:
    """Takes what a plan asks for out of the rows."""
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


def build_batch(rows: Rows, scheduled: Scheduled, batch: InputBatch) -> BatchRows:
    """Fills the batch with what a plan asks for, and counts its tokens as computed.

    The batch's logit_indices are, for each row that then samples, its last token and as many before it as it has
    drafts.
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
    return batch_rows


def _with_drafts(last_N: np.ndarray, num_drafts_N: np.ndarray) -> np.ndarray:
    """For each row the indices of its last num_drafts_N + 1 tokens, in order."""
    counts_N = num_drafts_N + 1
    offsets = np.arange(counts_N.sum()) - (counts_N.cumsum() - counts_N).repeat(counts_N)
    return (last_N - num_drafts_N).repeat(counts_N) + offsets
