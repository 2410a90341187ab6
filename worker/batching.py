"""From rows to the tensors of one step, without a Python loop over tokens or rows.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, B blocks of the longest row's context.
"""

import numpy as np
import torch

from worker.input_batch import InputBatch
from worker.rows import Rows


def build_batch(rows: Rows, rows_S: np.ndarray, num_tokens_S: np.ndarray) -> tuple[InputBatch, np.ndarray]:
    """The batch in which rows_S[i] computes its next num_tokens_S[i] tokens, and which of them then sample.

    Counts those tokens as computed. Returns (batch, indices into S); the batch's logit_indices are the last tokens of
    the rows that sample.
    """
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
    batch = InputBatch(
        token_ids_T=torch.from_numpy(rows.token_ids_RL[row_T, positions_T].astype(np.int64)),
        positions_T=torch.from_numpy(positions_T),
        slots_T=torch.from_numpy(block_T * rows.block_size + positions_T % rows.block_size),
        query_starts=query_starts,
        context_lens_S=context_lens_S,
        block_tables_SB=rows.block_ids_RB[rows_S, :num_blocks],
        logit_indices=torch.from_numpy(ends_S[sampling_S] - 1),
    )
    return batch, sampling_S
