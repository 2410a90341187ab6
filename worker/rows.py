"""The permanent rows: what the worker remembers of every sequence, so that plans can be differences.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, B blocks of a row's table.
"""

import numpy as np

from protos import step_pb2
from worker.errors import PlanError
from worker.sampling_state import SamplingState


class Rows:
    """Tokens, progress, block tables and sampling parameters of max_num_seqs rows.

    `apply` takes the differences of a plan; `advance` then counts the step's tokens as computed, and `append` adds what
    was sampled.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """num_blocks: those that can be given out, numbered from 1."""
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.block_size = max_model_len, block_size
        self.num_blocks, self.vocab_size = num_blocks, vocab_size
        # Pages of these two cost memory once they are written, not before. The last token sampled may be the one past
        # max_model_len of a step that was planned too far; it is never computed.
        self.token_ids_RL = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_ids_RB = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks_R = np.zeros(max_num_seqs, np.int64)
        self.num_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.sequence_R = np.zeros(max_num_seqs, np.uint64)
        # Rows whose logits were not finite: they stay until the scheduler frees them.
        self.failed_R = np.zeros(max_num_seqs, np.bool_)
        self.sampling = SamplingState(num_rows=max_num_seqs, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._spoiled_blocks: list[np.ndarray] = []

    @property
    def live_rows(self) -> np.ndarray:
        """Rows that hold a sequence, in order."""
        return np.flatnonzero(self.num_tokens_R)

    def clear(self) -> None:
        """Forgets every row."""
        for row in self.live_rows.tolist():
            self._free(row)

    def apply(self, plan: step_pb2.StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Frees, fills and grows rows as a plan says.

        Returns the step's (rows, tokens each computes), int64 [S]. Raises PlanError, after which rows are good for
        nothing but `clear`.
        """
        for row in self._live(plan.freed_rows, "freed_rows").tolist():
            self._free(row)
        for new in plan.new_rows:
            self._fill(new)
        self._grow(plan)
        return self._scheduled(plan)

    def take_spoiled_blocks(self) -> np.ndarray:
        """Blocks of failed rows freed since the last call, which nobody else holds: their KV may not be finite."""
        if not self._spoiled_blocks:
            return np.empty(0, np.int64)
        spoiled = np.unique(np.concatenate(self._spoiled_blocks))
        self._spoiled_blocks = []
        # Blocks taken over in the same step are not written yet; blocks shared with a row that computes are not ours.
        in_use = [self._computed_blocks(row) for row in self.live_rows.tolist()]
        return np.setdiff1d(spoiled, np.concatenate(in_use)) if in_use else spoiled

    def advance(self, rows_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """Counts the step's tokens as computed; which rows then sample (indices into S)."""
        self.num_computed_tokens_R[rows_S] += num_tokens_S
        return np.flatnonzero(self.num_computed_tokens_R[rows_S] == self.num_tokens_R[rows_S])

    def append(self, rows_S: np.ndarray, token_ids_S: np.ndarray) -> None:
        """Adds one sampled token to each of distinct rows."""
        self.token_ids_RL[rows_S, self.num_tokens_R[rows_S]] = token_ids_S
        self.num_tokens_R[rows_S] += 1
        for row, token in zip(rows_S.tolist(), token_ids_S.tolist(), strict=True):
            self.sampling.append(row, token)

    def output_positions(self, rows_S: np.ndarray) -> np.ndarray:
        """Output index of the token that each row samples next."""
        return self.num_tokens_R[rows_S] - self.num_prompt_tokens_R[rows_S]

    def _free(self, row: int) -> None:
        if self.failed_R[row]:
            self._spoiled_blocks.append(self.block_ids_RB[row, : self.num_blocks_R[row]].astype(np.int64))
            self.failed_R[row] = False
        self.block_ids_RB[row, : self.num_blocks_R[row]] = 0
        self.num_blocks_R[row] = self.num_tokens_R[row] = self.num_computed_tokens_R[row] = 0
        self.sampling.clear(row)

    def _computed_blocks(self, row: int) -> np.ndarray:
        return self.block_ids_RB[row, : -(-self.num_computed_tokens_R[row] // self.block_size)]

    def _fill(self, new: step_pb2.NewRow) -> None:
        row, num_tokens = new.row, len(new.token_ids)
        if row >= self.max_num_seqs:
            raise PlanError(f"new_rows: row {row} does not exist; max_num_seqs is {self.max_num_seqs}")
        if self.num_tokens_R[row]:
            raise PlanError(f"new_rows: row {row} holds sequence {self.sequence_R[row]}; free it first")
        if new.sequence in self.sequence_R[self.live_rows]:
            raise PlanError(f"new_rows: sequence {new.sequence} has a row already; a number is used once in an epoch")
        if not 1 <= num_tokens <= self.max_model_len:
            raise PlanError(f"new_rows: row {row} has {num_tokens} token_ids; max_model_len is {self.max_model_len}")
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            raise PlanError(f"new_rows: row {row} has num_prompt_tokens={new.num_prompt_tokens} of {num_tokens} tokens")
        if new.num_computed_tokens >= num_tokens:
            raise PlanError(f"new_rows: row {row} has num_computed_tokens={new.num_computed_tokens} of {num_tokens}")
        token_ids = np.fromiter(new.token_ids, np.int64, num_tokens)
        if (largest := token_ids.max()) >= self.vocab_size:
            raise PlanError(f"new_rows: row {row} has token id {largest}; vocab_size is {self.vocab_size}")
        prompt, output = np.split(token_ids, [new.num_prompt_tokens])
        self.sampling.set(row, new.sampling, new.choice, prompt, output)
        self.token_ids_RL[row, :num_tokens] = token_ids
        self.num_tokens_R[row] = num_tokens
        self.num_prompt_tokens_R[row] = new.num_prompt_tokens
        self.num_computed_tokens_R[row] = new.num_computed_tokens
        self.sequence_R[row] = new.sequence
        self._append_blocks(row, np.fromiter(new.block_ids, np.int64, len(new.block_ids)), "new_rows")

    def _grow(self, plan: step_pb2.StepPlan) -> None:
        rows = self._live(plan.grown_rows, "grown_rows")
        counts = np.fromiter(plan.num_new_blocks, np.int64, len(plan.num_new_blocks))
        blocks = np.fromiter(plan.new_blocks, np.int64, len(plan.new_blocks))
        if len(counts) != len(rows) or counts.sum() != len(blocks):
            raise PlanError(
                f"num_new_blocks: {len(counts)} entries with the sum {counts.sum()}, for {len(rows)} grown_rows and "
                f"{len(blocks)} new_blocks"
            )
        starts = np.cumsum(counts) - counts
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            self._append_blocks(row, blocks[start : start + count], "new_blocks")

    def _append_blocks(self, row: int, block_ids: np.ndarray, field: str) -> None:
        held = int(self.num_blocks_R[row])
        outside = block_ids[(block_ids < 1) | (block_ids > self.num_blocks)]
        if len(outside):
            raise PlanError(f"{field}: row {row} gets block {outside[0]}; there are blocks 1 to {self.num_blocks}")
        if held + len(block_ids) > self.block_ids_RB.shape[1]:
            raise PlanError(
                f"{field}: row {row} would hold {held + len(block_ids)} blocks of {self.block_size} tokens; "
                f"max_model_len is {self.max_model_len}"
            )
        self.block_ids_RB[row, held : held + len(block_ids)] = block_ids
        self.num_blocks_R[row] = held + len(block_ids)

    def _scheduled(self, plan: step_pb2.StepPlan) -> tuple[np.ndarray, np.ndarray]:
        rows_S = self._live(plan.rows, "rows")
        counts_S = np.fromiter(plan.num_tokens, np.int64, len(plan.num_tokens))
        if len(counts_S) != len(rows_S) or not len(rows_S):
            raise PlanError(f"num_tokens: {len(counts_S)} entries for {len(rows_S)} rows; as many, and one at least")
        if counts_S.min() < 1 or counts_S.sum() > self.max_num_batched_tokens:
            raise PlanError(
                f"num_tokens: from {counts_S.min()} on, {counts_S.sum()} in all; each is at least 1, and "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        after_S = self.num_computed_tokens_R[rows_S] + counts_S
        for wrong_S, what, limit_S in (
            (after_S > self.num_tokens_R[rows_S], "it knows tokens:", self.num_tokens_R[rows_S]),
            (after_S > self.num_blocks_R[rows_S] * self.block_size, "it holds blocks:", self.num_blocks_R[rows_S]),
            (after_S > self.max_model_len, "max_model_len:", np.full(len(rows_S), self.max_model_len)),
        ):
            if wrong_S.any():
                i = int(wrong_S.argmax())
                raise PlanError(
                    f"num_tokens: row {rows_S[i]} would have {after_S[i]} tokens computed; {what} {limit_S[i]}"
                )
        return rows_S, counts_S

    def _live(self, values, field: str) -> np.ndarray:  # a repeated uint32
        """The rows a field names, which must be live and distinct."""
        rows = np.fromiter(values, np.int64, len(values))
        if not len(rows):
            return rows
        if (largest := rows.max()) >= self.max_num_seqs:
            raise PlanError(f"{field}: row {largest} does not exist; max_num_seqs is {self.max_num_seqs}")
        free = rows[self.num_tokens_R[rows] == 0]
        if len(free):
            raise PlanError(f"{field}: row {free[0]} holds no sequence")
        times = np.bincount(rows)
        if times.max() > 1:
            raise PlanError(f"{field}: row {times.argmax()} is named {times.max()} times")
        return rows
