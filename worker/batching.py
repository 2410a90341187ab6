"""From rows to the tensors of one step, without a Python loop over tokens or rows.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, B blocks of the longest row's context.
"""

import numpy as np
import torch

from worker.input_batch import InputBatch
from worker.rows import Rows
from worker.scheduled import Scheduled


def build_batch(rows: Rows, scheduled: Scheduled) -> tuple[InputBatch, np.ndarray]:
    """The batch that a plan asks for, and which of its rows then sample.

    Counts its tokens as computed. Returns (batch, indices into S); the batch's logit_indices are, for each row that
    samples, its last token and as many before it as it has drafts.
    """
    rows_S, num_tokens_S = scheduled.rows_S, scheduled.num_tokens_S
    ends_S = num_tokens_S.cumsum()
    query_starts = np.concatenate(([0], ends_S)).astype(np.int32)
    num_tokens = int(ends_S[-1])
    first_positions_S = rows.num_computed_tokens_R[rows_S]
    row_T = np.repeat(rows_S, num_tokens_S)
    positions_T = np.repeat(first_positions_S - query_starts[:-1], num_tokens_S) + np.arange(num_tokens)
    block_T = rows.block_ids_RB[row_T, positions_T // rows.block_size].astype(np.int64)
    sampling_S = rows.advance(rows_S, num_tokens_S)
    context_lens_S = rows.num_computed_tokens_R[rows_S].astype(np.int32)
    num_blocks = -(-int(context_lens_S.max()) // rows.block_size)
    logit_indices = ends_S[sampling_S] - 1
    if scheduled.num_drafts_S is not None:
        logit_indices = _with_drafts(logit_indices, scheduled.num_drafts_S[sampling_S])
    batch = InputBatch(
        token_ids_T=torch.from_numpy(rows.token_ids_RL[row_T, positions_T].astype(np.int64)),
        positions_T=torch.from_numpy(positions_T),
        slots_T=torch.from_numpy(block_T * rows.block_size + positions_T % rows.block_size),
        query_starts=query_starts,
        context_lens_S=context_lens_S,
        block_tables_SB=rows.block_ids_RB[rows_S, :num_blocks],
        logit_indices=torch.from_numpy(logit_indices),
    )
    return batch, sampling_S


def _with_drafts(last_N: np.ndarray, num_drafts_N: np.ndarray) -> np.ndarray:
    """For each row the indices of its last num_drafts_N + 1 tokens, in order."""
    counts_N = num_drafts_N + 1
    offsets = np.arange(counts_N.sum()) - (counts_N.cumsum() - counts_N).repeat(counts_N)
    return (last_N - num_drafts_N).repeat(counts_N) + offsets
