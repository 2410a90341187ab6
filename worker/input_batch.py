"""One step's batch, in memory that all steps share.

Shape suffixes: D replicas, T tokens of the step, S scheduled rows, B blocks of the longest row's context, L positions
whose logits are wanted.
"""

from collections.abc import Sequence

import numpy as np
import torch


class InputBatch:
    """A step as the model sees it. Row i's tokens are query_starts[i] : query_starts[i + 1] of the T axis.

    The numbers of each step lie where those of the step before did: what was recorded with their addresses is good for
    all steps.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, max_blocks: int) -> None:
        """max_blocks: of a row."""
        self.max_tokens, self.max_rows, self.max_blocks = max_tokens, max_rows, max_blocks
        # How much of the arrays is the step's; their pages cost memory once they are written.
        self.num_tokens = self.num_rows = self.num_blocks = self.num_logits = 0
        # Tokens of the step at each replica that computes it, this one's among them; empty: there is no other.
        self.num_tokens_D: Sequence[int] = ()
        self.token_ids = np.zeros(max_tokens, np.int64)
        self.positions = np.zeros(max_tokens, np.int64)
        self.slots = np.zeros(max_tokens, np.int64)
        self.starts = np.zeros(max_rows + 1, np.int32)
        self.context_lens = np.zeros(max_rows, np.int32)
        self.block_tables = np.zeros((max_rows, max_blocks), np.int32)
        self.logit_places = np.zeros(max_tokens, np.int64)

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
        """A batch with room for this step; its numbers are copied."""
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
        """Takes a step's numbers: see the properties of these names."""
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
    def token_ids_T(self) -> torch.Tensor:
        """int64."""
        return torch.from_numpy(self.token_ids[: self.num_tokens])

    @property
    def positions_T(self) -> torch.Tensor:
        """int64, positions within the sequence."""
        return torch.from_numpy(self.positions[: self.num_tokens])

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
