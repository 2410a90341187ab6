"""The permanent rows: the worker remembers every sequence, so that plans only carry differences.
`Rows` says whether a plan is valid; functions that are not said to raise read any plan.

Shape suffixes: R permanent rows, S scheduled rows, T tokens of the step, B blocks of a row's table.
"""

from dataclasses import dataclass

import numpy as np

from protos import step_pb2
from worker.errors import PlanError
from worker.sampling.grammars import Grammars
from worker.sampling.state import SamplingState
from worker.step.inputs import LAST_SAMPLED, RowChanges, Scheduled
from worker.step.items import ItemRows, ItemTokens


def column_of(data: bytes, field: str, dtype: str) -> np.ndarray:
    """A column whose entries have this type. Raises PlanError for bytes that are no whole entries."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise PlanError(f"{field}: {len(data)} bytes, but entries have {size} bytes each")
    return np.frombuffer(data, dtype)


def decoding_rows(plan: step_pb2.StepPlan) -> np.ndarray:
    """uint16: the rows that decode, without drafts and with them, in batch order."""
    data = plan.decode_rows + plan.rows_with_drafts
    return np.frombuffer(data[: len(data) // 2 * 2], "<u2")


def num_drafts_of(plan: step_pb2.StepPlan) -> int:
    return len(plan.draft_token_ids) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSwaps:
    """Block copies of a plan: first KV blocks out_blocks[i] to host blocks out_host_blocks[i], then host blocks
    in_host_blocks[i] to KV blocks in_blocks[i]. int64."""

    out_blocks: np.ndarray
    out_host_blocks: np.ndarray
    in_host_blocks: np.ndarray
    in_blocks: np.ndarray


def planned_swaps(plan: step_pb2.StepPlan, *, last_block: int, num_host_blocks: int) -> PlannedSwaps | None:
    """Returns a plan's swaps, checked, or None. KV blocks that can be allocated are 1 to last_block; host blocks are
    numbered from 0. Raises PlanError."""
    if not (plan.swap_out_blocks or plan.swap_out_host_blocks or plan.swap_in_blocks or plan.swap_in_host_blocks):
        return None
    swaps = PlannedSwaps(
        out_blocks=_swapped_blocks(plan.swap_out_blocks, "swap_out_blocks", 1, last_block),
        out_host_blocks=_swapped_blocks(plan.swap_out_host_blocks, "swap_out_host_blocks", 0, num_host_blocks - 1),
        in_host_blocks=_swapped_blocks(plan.swap_in_host_blocks, "swap_in_host_blocks", 0, num_host_blocks - 1),
        in_blocks=_swapped_blocks(plan.swap_in_blocks, "swap_in_blocks", 1, last_block),
    )
    for name, sources, targets in (
        ("swap_out_host_blocks", swaps.out_blocks, swaps.out_host_blocks),
        ("swap_in_blocks", swaps.in_host_blocks, swaps.in_blocks),
    ):
        if len(sources) != len(targets):
            raise PlanError(f"{name}: {len(targets)} entries for {len(sources)} blocks to copy")
        if len(np.unique(targets)) != len(targets):
            raise PlanError(f"{name}: a block is named twice")
    return swaps


def _swapped_blocks(values, field: str, first: int, last: int) -> np.ndarray:  # a repeated uint32
    ids = np.fromiter(values, np.int64, len(values))
    outside = ids[(ids < first) | (ids > last)]
    if len(outside):
        raise PlanError(f"{field}: {outside[0]}; there are blocks {first} to {last}")
    return ids


# Results carry sequences as int64.
_LARGEST_SEQUENCE = 2**63 - 1


class Rows:
    """Tokens, progress, block tables and sampling parameters of max_num_seqs rows.

    In each step `apply` takes a plan's differences, `schedule` returns what it computes, and `advance` counts the
    tokens as computed, drafts included. Then `settle_drafts` removes the drafts, and `append` adds the sampled tokens,
    or `append_unknown` if they are on a device and the results come later.
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
        grammars: Grammars | None = None,
        item_tokens: ItemTokens | None = None,
    ) -> None:
        """num_blocks: blocks that can be allocated, numbered from 1. grammars: None if the rows can have no constraint,
        or do not sample here. item_tokens: None if the rows can have no images and videos."""
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.block_size = max_model_len, block_size
        self.num_blocks, self.vocab_size = num_blocks, vocab_size
        # Pages of these two cost memory only once they are written. The extra token: a step that was planned ahead may
        # sample one past max_model_len, which is never computed.
        self.token_ids_RL = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_ids_RB = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks_R = np.zeros(max_num_seqs, np.int64)
        self.num_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens_R = np.zeros(max_num_seqs, np.int64)
        self.sequence_R = np.zeros(max_num_seqs, np.int64)
        # Rows whose logits were not finite: they stay until the scheduler frees them.
        self.failed_R = np.zeros(max_num_seqs, np.bool_)
        self.sampling = SamplingState(
            num_rows=max_num_seqs, vocab_size=vocab_size, eos_token_ids=eos_token_ids, grammars=grammars
        )
        self.items = None if item_tokens is None else ItemRows(item_tokens, max_num_seqs)
        self._spoiled_blocks: list[np.ndarray] = []
        self._changes: RowChanges | None = None

    @property
    def live_rows(self) -> np.ndarray:
        """Rows that hold a sequence, in order."""
        return np.flatnonzero(self.num_tokens_R)

    @property
    def changes(self) -> RowChanges:
        """The changes that the last `apply` made."""
        if self._changes is None:
            self._changes = RowChanges()
        return self._changes

    def clear(self) -> None:
        """Forgets every row."""
        for row in self.live_rows.tolist():
            self._free(row)

    def apply(self, plan: step_pb2.StepPlan) -> None:
        """Frees, fills, trims and grows rows according to a plan. Ignores its swaps; see `planned_swaps`.

        Raises PlanError; then only `clear` may follow.
        """
        self._changes = None
        # Most steps with few rows do none of this.
        if plan.freed_rows:
            for row in self._live(_ids(plan.freed_rows), "freed_rows").tolist():
                self._free(row)
        if plan.new_rows:
            for new in plan.new_rows:
                self._fill(new)
        if plan.trimmed_rows or plan.num_kept_blocks:
            self._trim(plan)
        if plan.grown_rows or plan.num_new_blocks or plan.new_blocks:
            self._grow(plan)

    def take_spoiled_blocks(self) -> np.ndarray:
        """Returns blocks of failed rows that were freed since the last call and that no other row reads: their KV may
        not be finite."""
        if not self._spoiled_blocks:
            return np.empty(0, np.int64)
        spoiled = np.unique(np.concatenate(self._spoiled_blocks))
        self._spoiled_blocks = []
        # Includes blocks that a new row got but has not written. Excludes blocks with computed tokens of a live row.
        in_use = [self._computed_blocks(row) for row in self.live_rows.tolist()]
        return np.setdiff1d(spoiled, np.concatenate(in_use)) if in_use else spoiled

    def advance(self, rows_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """Counts the step's tokens as computed. Returns the rows that sample, as indices into S."""
        self.num_computed_tokens_R[rows_S] += num_tokens_S
        return np.flatnonzero(self.num_computed_tokens_R[rows_S] == self.num_tokens_R[rows_S])

    def settle_drafts(self, rows_S: np.ndarray, num_drafts_S: np.ndarray) -> None:
        """Removes the drafts, the last tokens of these rows; token_ids_RL keeps them until `append` overwrites them."""
        self.num_tokens_R[rows_S] -= num_drafts_S

    def append(self, rows_S: np.ndarray, token_ids_S: np.ndarray) -> None:
        """Appends one sampled token to each row, still to be computed; all tokens before it are. Rows are distinct."""
        num_tokens_S = self.num_tokens_R[rows_S]
        self.token_ids_RL[rows_S, num_tokens_S] = token_ids_S
        self.num_tokens_R[rows_S] = num_tokens_S + 1
        self.num_computed_tokens_R[rows_S] = num_tokens_S
        self.sampling.append_all(rows_S, token_ids_S)

    def append_unknown(self, rows_S: np.ndarray, num_tokens_S: np.ndarray | int = 1) -> None:
        """Appends num_tokens_S tokens to each row that only the device knows; all but the last one are computed.

        The last one becomes LAST_SAMPLED. The others are left unwritten, since computed tokens are not read again.
        """
        num_tokens_S = self.num_tokens_R[rows_S] + num_tokens_S
        self.token_ids_RL[rows_S, num_tokens_S - 1] = LAST_SAMPLED
        self.num_tokens_R[rows_S] = num_tokens_S
        self.num_computed_tokens_R[rows_S] = num_tokens_S - 1

    def output_positions(self, rows_S: np.ndarray) -> np.ndarray:
        """Returns the output index of the token that each row samples next."""
        return self.num_tokens_R[rows_S] - self.num_prompt_tokens_R[rows_S]

    def _free(self, row: int) -> None:
        self.changes.free(row, int(self.sequence_R[row]))
        if self.failed_R[row]:
            self._spoiled_blocks.append(self.block_ids_RB[row, : self.num_blocks_R[row]].astype(np.int64))
            self.failed_R[row] = False
        self.block_ids_RB[row, : self.num_blocks_R[row]] = 0
        self.num_blocks_R[row] = self.num_tokens_R[row] = self.num_computed_tokens_R[row] = 0
        self.sampling.clear(row)
        if self.items is not None:
            self.items.free(row)

    def _computed_blocks(self, row: int) -> np.ndarray:
        return self.block_ids_RB[row, : -(-self.num_computed_tokens_R[row] // self.block_size)]

    def _fill(self, new: step_pb2.NewRow) -> None:
        row, num_tokens = new.row, len(new.token_ids)
        if row >= self.max_num_seqs:
            raise PlanError(f"new_rows: row {row} does not exist; max_num_seqs is {self.max_num_seqs}")
        if self.num_tokens_R[row]:
            raise PlanError(f"new_rows: row {row} holds sequence {self.sequence_R[row]}; free it first")
        if new.sequence > _LARGEST_SEQUENCE:
            raise PlanError(f"new_rows: sequence {new.sequence} is beyond {_LARGEST_SEQUENCE}, the largest in results")
        if new.sequence in self.sequence_R[self.live_rows]:
            raise PlanError(f"new_rows: sequence {new.sequence} already has a row; numbers are used once per epoch")
        if not 1 <= num_tokens <= self.max_model_len:
            raise PlanError(f"new_rows: row {row} has {num_tokens} token_ids; max_model_len is {self.max_model_len}")
        if not 1 <= new.num_prompt_tokens <= num_tokens:
            raise PlanError(f"new_rows: row {row} has num_prompt_tokens={new.num_prompt_tokens} of {num_tokens} tokens")
        if new.num_computed_tokens >= num_tokens:
            raise PlanError(f"new_rows: row {row} has num_computed_tokens={new.num_computed_tokens} of {num_tokens}")
        token_ids = _ids(new.token_ids)
        if (largest := token_ids.max()) >= self.vocab_size:
            raise PlanError(f"new_rows: row {row} has token id {largest}; vocab_size is {self.vocab_size}")
        prompt, output = np.split(token_ids, [new.num_prompt_tokens])
        if new.items:
            if self.items is None:
                raise PlanError(f"new_rows: row {row} has {len(new.items)} items; the model here takes text only")
            self.items.fill(new, prompt)
        self.changes.new_rows.append(self.sampling.set(row, new.sampling, new.choice, prompt, output))
        self.token_ids_RL[row, :num_tokens] = token_ids
        self.num_tokens_R[row] = num_tokens
        self.num_prompt_tokens_R[row] = new.num_prompt_tokens
        self.num_computed_tokens_R[row] = new.num_computed_tokens
        self.sequence_R[row] = new.sequence
        block_ids = _ids(new.block_ids)
        self._append_blocks(np.array([row]), np.array([len(block_ids)]), block_ids, "new_rows")

    def _trim(self, plan: step_pb2.StepPlan) -> None:
        rows = self._live(_ids(plan.trimmed_rows), "trimmed_rows")
        if len(plan.num_kept_blocks) != len(rows):
            raise PlanError(f"num_kept_blocks: {len(plan.num_kept_blocks)} entries for {len(rows)} trimmed_rows")
        for row, kept in zip(rows.tolist(), plan.num_kept_blocks, strict=True):
            held, computed = int(self.num_blocks_R[row]), int(self.num_computed_tokens_R[row])
            if not -(-computed // self.block_size) <= kept <= held:
                raise PlanError(
                    f"num_kept_blocks: row {row} would keep {kept} blocks of {held}; {computed} tokens are computed"
                )
            self.block_ids_RB[row, kept:held] = 0
            self.num_blocks_R[row] = kept

    def _grow(self, plan: step_pb2.StepPlan) -> None:
        rows = self._live(_ids(plan.grown_rows), "grown_rows")
        counts, blocks = _ids(plan.num_new_blocks), _ids(plan.new_blocks)
        if len(counts) != len(rows) or counts.sum() != len(blocks):
            raise PlanError(
                f"num_new_blocks: {len(counts)} entries with the sum {counts.sum()}, for {len(rows)} grown_rows and "
                f"{len(blocks)} new_blocks"
            )
        self._append_blocks(rows, counts, blocks, "new_blocks")

    def _append_blocks(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray, field: str) -> None:
        """Appends counts[i] of block_ids to the table of rows[i]; rows are distinct."""
        held = self.num_blocks_R[rows]
        row_of_block = rows.repeat(counts)
        wrong = (block_ids < 1) | (block_ids > self.num_blocks)
        if wrong.any():
            i = int(wrong.argmax())
            raise PlanError(
                f"{field}: row {row_of_block[i]} gets block {block_ids[i]}; there are blocks 1 to {self.num_blocks}"
            )
        after = held + counts
        beyond = after > self.block_ids_RB.shape[1]
        if beyond.any():
            i = int(beyond.argmax())
            raise PlanError(
                f"{field}: row {rows[i]} would hold {after[i]} blocks of {self.block_size} tokens; "
                f"max_model_len is {self.max_model_len}"
            )
        # A row's new blocks go to the end of its table, in order.
        offsets = np.arange(len(block_ids)) - (counts.cumsum() - counts).repeat(counts)
        places = held.repeat(counts) + offsets
        self.block_ids_RB[row_of_block, places] = block_ids
        self.num_blocks_R[rows] = after
        self.changes.write_table(row_of_block, places, block_ids)

    def schedule(self, plan: step_pb2.StepPlan, *, may_be_empty: bool = False) -> Scheduled:
        """Returns what an applied plan computes, and appends drafts to the tokens of their rows. may_be_empty: a plan
        without work is valid.

        Raises PlanError; then only `clear` may follow.
        """
        decode_rows = column_of(plan.decode_rows, "decode_rows", "<u2")
        drafting_rows = column_of(plan.rows_with_drafts, "rows_with_drafts", "<u2")
        chunk_rows, chunk_counts = _ids(plan.rows), _ids(plan.num_tokens)
        if may_be_empty and not (plan.decode_rows or plan.rows_with_drafts or plan.rows or plan.num_tokens):
            return Scheduled(rows_S=chunk_rows, num_tokens_S=chunk_counts)
        num_decodes = len(decode_rows) + len(drafting_rows)
        if len(chunk_counts) != len(chunk_rows) or not num_decodes + len(chunk_rows):
            raise PlanError(
                f"num_tokens: {len(chunk_counts)} entries for {len(chunk_rows)} rows; give one for each, and at least "
                f"one row, here, in decode_rows or in rows_with_drafts"
            )
        rows_S = self._live(np.concatenate((decode_rows, drafting_rows, chunk_rows), dtype=np.int64), "rows")
        drafts_S, drafting_S = None, slice(len(decode_rows), num_decodes)
        if plan.rows_with_drafts or plan.num_drafts or plan.draft_token_ids:
            drafts_S = np.zeros(len(rows_S), np.int64)
            drafts_S[drafting_S] = self._put_drafts(plan, rows_S[drafting_S])
        counts_S = np.ones(len(rows_S), np.int64) if drafts_S is None else 1 + drafts_S
        counts_S[num_decodes:] = chunk_counts
        if counts_S.min() < 1 or counts_S.sum() > self.max_num_batched_tokens:
            raise PlanError(
                f"num_tokens: the least is {counts_S.min()}, the sum {counts_S.sum()}; each must be at least 1, and "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}"
            )
        after_S = self.num_computed_tokens_R[rows_S] + counts_S
        for wrong_S, what, limit_S in (
            (after_S > self.num_tokens_R[rows_S], "tokens known:", self.num_tokens_R[rows_S]),
            (after_S > self.num_blocks_R[rows_S] * self.block_size, "blocks held:", self.num_blocks_R[rows_S]),
            (after_S > self.max_model_len, "max_model_len:", np.full(len(rows_S), self.max_model_len)),
        ):
            if wrong_S.any():
                i = int(wrong_S.argmax())
                raise PlanError(
                    f"num_tokens: row {rows_S[i]} would have {after_S[i]} tokens computed; {what} {limit_S[i]}"
                )
        self._check_whole(rows_S[: len(decode_rows)], after_S[: len(decode_rows)], "decode_rows")
        self._check_whole(rows_S[drafting_S], after_S[drafting_S], "rows_with_drafts")
        return Scheduled(rows_S=rows_S, num_tokens_S=counts_S, num_drafts_S=drafts_S)

    def _check_whole(self, rows: np.ndarray, after: np.ndarray, field: str) -> None:
        """Raises PlanError if a row would not have all its tokens computed after the step."""
        wrong = after != self.num_tokens_R[rows]
        if wrong.any():
            i = int(wrong.argmax())
            raise PlanError(
                f"{field}: row {rows[i]} would have {after[i]} tokens computed of {self.num_tokens_R[rows[i]]}; "
                f"such a row must compute all its tokens"
            )

    def _put_drafts(self, plan: step_pb2.StepPlan, rows: np.ndarray) -> np.ndarray:
        """Appends drafts to the tokens of their rows. Returns the number of drafts of each row."""
        counts = column_of(plan.num_drafts, "num_drafts", "<i4").astype(np.int64)
        token_ids = column_of(plan.draft_token_ids, "draft_token_ids", "<i4")
        if len(counts) != len(rows) or counts.sum() != len(token_ids):
            raise PlanError(
                f"num_drafts: {len(counts)} entries with the sum {counts.sum()}, for {len(rows)} rows_with_drafts and "
                f"{len(token_ids)} draft_token_ids"
            )
        if (few := counts < 1).any():
            raise PlanError(f"num_drafts: {counts[few][0]} for row {rows[few][0]}; a row with drafts has at least 1")
        wrong = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
        if len(wrong):
            raise PlanError(f"draft_token_ids: token id {wrong[0]}; vocab_size is {self.vocab_size}")
        known = self.num_tokens_R[rows]
        beyond = known + counts > self.max_model_len
        if beyond.any():
            i = int(beyond.argmax())
            raise PlanError(
                f"num_drafts: row {rows[i]} has {counts[i]} drafts after {known[i]} tokens; max_model_len is "
                f"{self.max_model_len}"
            )
        offsets = np.arange(len(token_ids)) - (counts.cumsum() - counts).repeat(counts)
        self.token_ids_RL[rows.repeat(counts), known.repeat(counts) + offsets] = token_ids
        self.num_tokens_R[rows] = known + counts
        return counts

    def _live(self, rows: np.ndarray, field: str) -> np.ndarray:
        """Checks that rows are live and distinct, and returns them. Raises PlanError."""
        if not len(rows):
            return rows
        if (largest := rows.max()) >= self.max_num_seqs:
            raise PlanError(f"{field}: row {largest} does not exist; max_num_seqs is {self.max_num_seqs}")
        is_free = self.num_tokens_R[rows] == 0
        if is_free.any():
            raise PlanError(f"{field}: row {rows[is_free.argmax()]} holds no sequence")
        times = np.bincount(rows)
        if times.max() > 1:
            raise PlanError(f"{field}: row {times.argmax()} is named {times.max()} times")
        return rows


def _ids(values) -> np.ndarray:  # a repeated uint32
    return np.fromiter(values, np.int64, len(values))
