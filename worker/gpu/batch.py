"""A step's batch on the GPU, as the model sees it.

Shape suffixes: S rows of the batch, T tokens, R permanent rows, B blocks of a row's table.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBatch:
    """Row i's tokens are query_starts[i] : query_starts[i + 1] of the T axis. Tensors are on the GPU; in a graph they
    are where they were when it was captured.

    Padding: rows beyond the step's have rows_S = -1 and a context of 0; tokens beyond query_starts[-1], or of such
    rows, have token id -1, position 0 and slot -1.
    """

    token_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32, within the sequence
    slots_T: torch.Tensor  # int64, block id * block size + offset
    rows_S: torch.Tensor  # int32, whose tables are meant
    query_starts: torch.Tensor  # int32 [S + 1]
    context_lens_S: torch.Tensor  # int32, tokens whose KV exists after this step's writes
    block_tables_RB: torch.Tensor  # int32, of all permanent rows
    # No row has more queries.
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_rows(self) -> int:
        return len(self.rows_S)
