"""How far a drafter's own KV cache has come in each row and block.

A drafter computes lazily: when drafts are wanted, it first computes the tokens that it lacks. Its blocks have the
numbers of the model's blocks, so rows that share a block share what the drafter has computed there.

Shape suffixes: R permanent rows, B blocks, D drafting rows, C table entries that a plan writes, K drafts, T tokens.
"""

import numpy as np

from worker.step.rows import Rows

_UNKNOWN = -1


class DraftProgress:
    """Counts tokens from a row's or a block's first one on. Call `note_plan` after each `Rows.apply`; then `settle`
    says what rows have, and `advance` what was computed."""

    def __init__(self, rows: Rows, max_drafts: int) -> None:
        self._rows, self._block_size = rows, rows.block_size
        # Tokens of each row whose KV is there. _UNKNOWN: its blocks say it.
        self._num_R = np.full(rows.max_num_seqs, _UNKNOWN, np.int64)
        # Tokens of each block whose KV is there.
        self._filled_B = np.zeros(rows.num_blocks + 1, np.int64)
        # Drafts whose KV stands behind those tokens: it is right as far as the tokens turn out to be these.
        self._fed_RK = np.zeros((rows.max_num_seqs, max_drafts), np.int32)
        self._num_fed_R = np.zeros(rows.max_num_seqs, np.int64)

    def clear(self) -> None:
        """Forgets what all blocks hold."""
        self._filled_B[:] = 0
        self._num_R[:] = _UNKNOWN

    def drop_blocks(self, blocks: np.ndarray) -> None:
        """Blocks whose KV is not what was computed there."""
        self._filled_B[blocks] = 0
        self._num_R[:] = _UNKNOWN

    def note_plan(self) -> None:
        """Takes the changes of the plan that was applied to the rows, before its tokens count as computed."""
        rows, changes = self._rows, self._rows.changes
        fresh = [*changes.freed_rows, *(each.row for each in changes.new_rows)]
        if fresh:
            self._num_R[fresh] = _UNKNOWN
        for rows_C, places_C, block_ids_C in changes.tables:
            first_tokens_C = places_C * self._block_size
            # The others are shared: another row has computed them, or will in this step.
            self._filled_B[block_ids_C[first_tokens_C >= rows.num_computed_tokens_R[rows_C]]] = 0
            is_lost_C = self._num_R[rows_C] + self._num_fed_R[rows_C] > first_tokens_C
            self._num_R[rows_C[is_lost_C]] = _UNKNOWN

    def settle(self, rows_D: np.ndarray) -> np.ndarray:
        """Returns how many of each row's tokens have KV, int64 [D]."""
        rows = self._rows
        for row in rows_D[self._num_R[rows_D] == _UNKNOWN].tolist():
            self._num_R[row], self._num_fed_R[row] = self._in_blocks(row), 0
        width = int(self._num_fed_R[rows_D].max(initial=0))
        if width:
            nums_D, index = self._num_R[rows_D], np.arange(width)
            places_DK = np.minimum(nums_D[:, None] + index, rows.max_model_len)
            same_DK = rows.token_ids_RL[rows_D[:, None], places_DK] == self._fed_RK[rows_D, :width]
            same_DK &= index < np.minimum(self._num_fed_R[rows_D], rows.num_tokens_R[rows_D] - nums_D)[:, None]
            self.advance(rows_D, nums_D + np.logical_and.accumulate(same_DK, axis=1).sum(axis=1))
        return self._num_R[rows_D]

    def advance(self, rows_D: np.ndarray, nums_D: np.ndarray) -> None:
        """Notes that the KV of these rows' first nums_D tokens is there, as far as they have blocks for it."""
        nums_D = np.minimum(nums_D, self.num_held(rows_D))
        counts_D = np.maximum(nums_D - self._num_R[rows_D], 0)
        row_T = rows_D.repeat(counts_D)
        firsts_D = counts_D.cumsum() - counts_D
        position_T = np.arange(len(row_T)) + (self._num_R[rows_D] - firsts_D).repeat(counts_D)
        blocks_T = self._rows.block_ids_RB[row_T, position_T // self._block_size]
        np.maximum.at(self._filled_B, blocks_T, position_T % self._block_size + 1)
        self._num_R[rows_D] += counts_D
        self._num_fed_R[rows_D] = 0

    def feed(self, row: int, drafts: list[int]) -> None:
        """Notes that the KV of drafts stands behind the row's tokens, all of which have it."""
        end = int(self._rows.num_tokens_R[row])
        if self._num_R[row] != end:
            return
        drafts = drafts[: max(0, int(self.num_held(row)) - end)]
        self._fed_RK[row, : len(drafts)] = drafts
        self._num_fed_R[row] = len(drafts)

    def num_held(self, rows_D: np.ndarray | int) -> np.ndarray:
        """Tokens for which rows have blocks, int64 [D]."""
        return self._rows.num_blocks_R[rows_D] * self._block_size

    def _in_blocks(self, row: int) -> int:
        """Counts the tokens whose KV is in the row's blocks, up to the first that is lacking."""
        num_computed = int(self._rows.num_computed_tokens_R[row])
        filled = self._filled_B[self._rows.block_ids_RB[row, : -(-num_computed // self._block_size)]]
        lacking = np.flatnonzero(filled < self._block_size)
        num = int(filled.sum()) if not len(lacking) else lacking[0] * self._block_size + filled[lacking[0]]
        return min(int(num), num_computed)
