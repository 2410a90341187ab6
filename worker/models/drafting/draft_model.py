"""A second, smaller model that drafts. It has a KV cache of its own, with the model's block numbers.

It computes lazily: when drafts are wanted, first the tokens that it lacks, several rows at once, then one draft of all
rows after the other. Positions that have no block yet get blocks of its own, for the time of a call.

Shape suffixes: D drafting rows, T tokens of a pass, B blocks, V the model's vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from kernels.backend import Backend
from worker.layers.kv_cache import KVCache
from worker.models.drafting.drafter import Drafts
from worker.models.drafting.draws import drawn
from worker.models.drafting.progress import DraftProgress
from worker.step.batch import InputBatch
from worker.step.rows import Rows

# Tokens of a pass, beyond one of each row: more wait for the next step, so that a long prompt does not hold up a step
# for long. 128 tokens of SmolLM2 take 40 ms.
MOST_CATCH_UP = 128


@dataclass(slots=True)
class _Row:
    """A row that drafts, after `end` tokens; the draft model lacks those from `start` on."""

    row: int
    sequence: int
    most: int
    start: int
    end: int
    # Its blocks, and behind them some of the draft model's own.
    blocks_B: np.ndarray
    drafts: list[int] = field(default_factory=list)
    # Drafts that have KV.
    num_fed: int = 0


class DraftExecutor(Protocol):
    """Computes the draft model: worker.cpu.executor.CpuExecutor, or worker.gpu.executor.GpuDraftExecutor."""

    backend: Backend

    def wanted(self, batch: InputBatch, kv_cache: KVCache, /) -> Any:
        """Writes the KV of the batch's tokens, and returns the hidden states of its logit_indices."""
        ...

    def logits(self, hidden: Any, /) -> torch.Tensor:
        """Returns float32 logits [S, V], on the host, of such tokens."""
        ...

    def greedy(self, batch: InputBatch, kv_cache: KVCache, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces `wanted`: the likeliest token after each of the batch's logit_indices, int64, and its logit."""
        ...


class DraftModel:
    """A worker.models.drafting.drafter.Drafter."""

    def __init__(
        self,
        name: str,
        model: DraftExecutor,
        kv_cache: KVCache,
        rows: Rows,
        *,
        max_drafts: int,
        max_len: int,
        vocab_size: int,
    ) -> None:
        """kv_cache: has `num_spare` more blocks than the model's. max_len: the draft model's context. vocab_size: its
        own; the tokens that both models have are the same."""
        self.name = name
        self._model, self._kv_cache, self._rows = model, kv_cache, rows
        self._max_drafts, self._max_len, self._vocab_size = max_drafts, min(max_len, rows.max_model_len), vocab_size
        self._progress = DraftProgress(rows, max_drafts)
        self._num_spare = -(-max_drafts // rows.block_size)
        max_rows = rows.max_num_seqs
        self._batch = InputBatch(
            max_tokens=self.most_tokens(max_rows), max_rows=max_rows, max_blocks=rows.block_ids_RB.shape[1]
        )
        # Sequences for which the draft model gave logits that are not finite.
        self._failed: set[int] = set()

    @staticmethod
    def num_spare(max_num_seqs: int, max_drafts: int, block_size: int) -> int:
        """Blocks for positions that have none yet: the last sampled token, and all drafts but the last."""
        return max_num_seqs * -(-max_drafts // block_size)

    @staticmethod
    def most_tokens(max_num_seqs: int) -> int:
        """Tokens of a pass."""
        return max_num_seqs + MOST_CATCH_UP

    # --- The interface of drafters

    def note_plan(self) -> None:
        self._progress.note_plan()
        if self._failed:
            self._failed.difference_update(self._rows.changes.freed_sequences)

    def note_step(self, batch: InputBatch, rows_S: np.ndarray) -> None:
        """Does nothing: the rows say which tokens are new."""

    @property
    def swapped_layers(self) -> Sequence[torch.Tensor]:
        """None: the draft model computes tokens again."""
        return ()

    def drop_blocks(self, blocks: np.ndarray) -> None:
        self._progress.drop_blocks(blocks)

    def reset(self) -> None:
        self._progress.clear()
        self._failed.clear()

    @torch.inference_mode()
    def propose(self, wanted: Sequence[tuple[int, int]]) -> Drafts:
        drafting = list(self._begin(wanted))
        going = self._catch_up(drafting)
        while going:
            self._fill([(each, each.end + each.num_fed, 1) for each in going])
            for each in going:
                each.num_fed += 1
            going = self._choose(going)
        for each in drafting:
            self._progress.feed(each.row, each.drafts[: each.num_fed])
        return {each.row: each.drafts for each in drafting if each.drafts}

    # --- Passes

    def _begin(self, wanted: Sequence[tuple[int, int]]) -> Iterator[_Row]:
        """Yields the rows that can draft."""
        rows, first_spare = self._rows, self._rows.num_blocks + 1
        starts_D = self._progress.settle(np.array([row for row, _ in wanted], np.int64))
        for (row, most), start in zip(wanted, starts_D.tolist(), strict=True):
            end, sequence = int(rows.num_tokens_R[row]), int(rows.sequence_R[row])
            most = min(most, self._max_drafts, self._max_len - end)
            # The last one's logits are wanted, even if a draft had the same token.
            start = min(start, end - 1)
            if most < 1 or rows.failed_R[row] or sequence in self._failed:
                continue
            if rows.token_ids_RL[row, start:end].max() >= self._vocab_size:
                self._failed.add(sequence)
                continue
            spare_B = np.arange(first_spare, first_spare + self._num_spare)
            first_spare += self._num_spare
            blocks_B = np.concatenate((rows.block_ids_RB[row, : rows.num_blocks_R[row]], spare_B))
            yield _Row(row, sequence, most, start, end, blocks_B)

    def _catch_up(self, drafting: list[_Row]) -> list[_Row]:
        """Computes tokens that rows lack, those of the rows that lack least first, as many as a pass has. Rows that
        then have all get their first draft. Returns the rows that go on."""
        left, pieces, complete = self._batch.max_tokens, [], []
        for each in sorted(drafting, key=lambda row: row.end - row.start):
            count = min(each.end - each.start, left)
            if count:
                pieces.append((each, each.start, count))
                left -= count
            if each.start + count == each.end:
                complete.append(each)
        if not pieces:
            return []
        self._fill(pieces, num_complete=len(complete))
        rows_D = np.array([each.row for each, _, _ in pieces], np.int64)
        ends_D = np.array([start + count for _, start, count in pieces], np.int64)
        self._progress.advance(rows_D, ends_D)
        if complete:
            return self._choose(complete)
        self._model.wanted(self._batch, self._kv_cache)
        return []

    def _fill(self, pieces: Sequence[tuple[_Row, int, int]], num_complete: int | None = None) -> None:
        """Fills the batch with `count` tokens from `start` on of each row, of its own and its drafts; the first
        num_complete rows (None: all) want logits."""
        block_size = self._rows.block_size
        counts_D = np.array([count for _, _, count in pieces], np.int64)
        starts_D = np.array([start for _, start, _ in pieces], np.int64)
        query_starts = np.concatenate(([0], counts_D.cumsum()))
        index_T = np.arange(len(pieces)).repeat(counts_D)
        positions_T = np.arange(len(index_T)) + (starts_D - query_starts[:-1])[index_T]
        token_ids_T = np.concatenate([self._tokens(*piece) for piece in pieces])
        width = int((starts_D + counts_D).max() - 1) // block_size + 1
        tables_DB = np.zeros((len(pieces), width), np.int32)
        for table_B, (each, _, _) in zip(tables_DB, pieces, strict=True):
            blocks_B = each.blocks_B[:width]
            table_B[: len(blocks_B)] = blocks_B
        blocks_T = tables_DB[index_T, positions_T // block_size].astype(np.int64)
        self._batch.fill(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=blocks_T * block_size + positions_T % block_size,
            query_starts=query_starts,
            context_lens_S=starts_D + counts_D,
            block_tables_SB=tables_DB,
            logit_indices=query_starts[1:][:num_complete] - 1,
        )

    def _tokens(self, each: _Row, start: int, count: int) -> np.ndarray:
        if start >= each.end:
            return np.array(each.drafts[start - each.end : start - each.end + count], np.int64)
        return self._rows.token_ids_RL[each.row, start : start + count]

    # --- Choosing

    def _choose(self, going: list[_Row]) -> list[_Row]:
        """Computes the batch, and gives each row, in its order, the draft that the row itself would draw from the draft
        model's logits. Returns the rows that go on."""
        sampling = self._rows.sampling
        rows_D = np.array([each.row for each in going], np.int64)
        if not sampling.needs_logits(rows_D) and not sampling.constrains(rows_D):
            token_ids_D, largest_D = (each.numpy() for each in self._model.greedy(self._batch, self._kv_cache))
            broken_D = ~np.isfinite(largest_D)
        else:
            token_ids_D, broken_D = self._draw(going, rows_D)
        for each, token, is_broken in zip(going, token_ids_D.tolist(), broken_D.tolist(), strict=True):
            if is_broken:
                self._give_up(each)
            elif 0 <= token < self._rows.vocab_size:
                each.drafts.append(token)
        return [
            each
            for each, token, is_broken in zip(going, token_ids_D.tolist(), broken_D.tolist(), strict=True)
            if not is_broken
            and 0 <= token < min(self._vocab_size, self._rows.vocab_size)
            and len(each.drafts) < each.most
            and token not in sampling.eos_token_ids
        ]

    def _draw(self, going: list[_Row], rows_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the draft of each row, -1 if no token is left, and which rows' logits are not finite."""
        kernels = self._model.backend.native
        own_DV = self._model.logits(self._model.wanted(self._batch, self._kv_cache)).numpy()
        broken_D = np.array(~np.isfinite(own_DV).all(axis=1))
        logits_DV = own_DV
        if own_DV.shape[1] != self._rows.vocab_size:
            logits_DV = np.full((len(going), self._rows.vocab_size), -np.inf, np.float32)
            both = min(own_DV.shape[1], self._rows.vocab_size)
            logits_DV[:, :both] = own_DV[:, :both]
        logits_DV[broken_D] = 0.0
        token_ids_D = drawn(self._rows, rows_D, [each.drafts for each in going], logits_DV, kernels)
        token_ids_D[broken_D] = -1
        return token_ids_D, broken_D

    def _give_up(self, each: _Row) -> None:
        """Drafts nothing more for a sequence for which the draft model computes numbers that are not finite, and zeroes
        what it has computed there: attention gives masked entries weight 0, and 0 * NaN is NaN."""
        self._failed.add(each.sequence)
        # What was computed before this call is finite.
        blocks_B = each.blocks_B[each.start // self._rows.block_size :].astype(np.int64)
        for layer in self._kv_cache.layers:
            layer[torch.from_numpy(blocks_B)] = 0
        self._progress.drop_blocks(blocks_B[blocks_B <= self._rows.num_blocks])
