"""The tensors of one step's batch.

Shape suffixes: T tokens of the step, S scheduled rows, B blocks of the longest row's table.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True, kw_only=True)
class InputBatch:
    """One step as the model sees it. Row i's tokens are query_starts[i] : query_starts[i + 1] of the T axis."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, position within the sequence
    slots_T: torch.Tensor  # int64, block id * block_size + offset: where the token's KV is written
    query_starts: np.ndarray  # int32 [S + 1], begins with 0
    context_lens_S: np.ndarray  # int32, tokens of the row whose KV exists after this step's writes
    block_tables_SB: np.ndarray  # int32, block ids in order; entries past a row's length are 0, the null block
    logit_indices: torch.Tensor  # int64, positions on the T axis whose logits are wanted

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def num_rows(self) -> int:
        return len(self.context_lens_S)
