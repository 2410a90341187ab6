"""A head over the model's hidden states that drafts, on a CPU; see worker/models/heads/head.py.

It follows every step of the model: the states of a step's tokens exist only then. Its KV at position i depends on the
token at i + 1, too; in a block that rows share, the last entry may be that of another row's next token, which costs
acceptance, never correctness. The passes of a chain write behind the last position, into the row's own block and then
into spare ones; the next step computes those positions again, from the model's states.

Shape suffixes: S rows of the step, T tokens, P rows that were followed, D drafting rows, E hidden size, B blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch

from worker.cpu.executor import CpuExecutor
from worker.cpu.heads import CpuHead
from worker.layers.forward_context import TargetStates
from worker.models.drafting.drafter import Drafts
from worker.models.drafting.draws import drawn
from worker.step.batch import InputBatch
from worker.step.rows import Rows

_NOT_FOLLOWED = -1


class HeadDrafter:
    """A worker.models.drafting.drafter.Drafter."""

    def __init__(self, name: str, head: CpuHead, target: CpuExecutor, rows: Rows, *, max_drafts: int) -> None:
        """target: computes the model, and keeps the layers that the head reads."""
        self.name = name
        self._head, self._target, self._rows, self._max_drafts = head, target, rows, max_drafts
        self._num_spare = spare_blocks_of_row(max_drafts, rows.block_size)
        self._first_spare = rows.num_blocks + 1
        self._kv_cache = head.new_cache(
            num_blocks=self._first_spare + rows.max_num_seqs * self._num_spare, block_size=rows.block_size
        )
        self._batch = InputBatch(
            max_tokens=max(rows.max_num_batched_tokens, rows.max_num_seqs),
            max_rows=rows.max_num_seqs,
            max_blocks=rows.block_ids_RB.shape[1] + self._num_spare,
        )
        # Each row's place among those that the latest step followed, and the head's result at their last positions.
        self._place_R = np.full(rows.max_num_seqs, _NOT_FOLLOWED, np.int64)
        self._positions_P = np.empty(0, np.int64)
        self._hidden_PE = torch.empty(0, head.config.hidden_size)

    @property
    def swapped_layers(self) -> Sequence[torch.Tensor]:
        return self._kv_cache.layers

    def note_plan(self) -> None:
        """Does nothing: the step says what is new."""

    def drop_blocks(self, blocks: np.ndarray) -> None:
        """Does nothing: the KV in these blocks comes and goes with the model's."""

    def reset(self) -> None:
        self._place_R[:] = _NOT_FOLLOWED

    # --- What the model has computed

    def note_step(self, batch: InputBatch, rows_S: np.ndarray) -> None:
        """Computes the head at those of the step's positions whose next token is known: all but rejected drafts."""
        self._place_R[:] = _NOT_FOLLOWED
        rows, num_tokens = self._rows, batch.num_tokens
        if not num_tokens:
            return
        index_T = np.arange(len(rows_S)).repeat(np.diff(batch.query_starts))
        positions_T = batch.positions[:num_tokens]
        ends_S = np.where(rows.failed_R[rows_S], 0, rows.num_tokens_R[rows_S] - 1)
        known = np.flatnonzero(positions_T < ends_S[index_T])
        counts_S = np.bincount(index_T[known], minlength=len(rows_S))
        followed = np.flatnonzero(counts_S)
        if not len(followed):
            return
        rows_P, query_starts = rows_S[followed], np.concatenate(([0], counts_S[followed].cumsum()))
        positions_T = positions_T[known]
        self._positions_P = positions_T[query_starts[1:] - 1]
        self._batch.fill(
            token_ids_T=rows.token_ids_RL[rows_S[index_T[known]], positions_T + 1],
            positions_T=positions_T,
            slots_T=batch.slots[:num_tokens][known],
            query_starts=query_starts,
            context_lens_S=self._positions_P + 1,
            block_tables_SB=batch.block_tables_SB[followed],
            logit_indices=query_starts[1:] - 1,
        )
        hidden_TE = self._head.states_of(_part(self._target.states(num_tokens), known))
        result_TE = self._head.forward(self._batch, self._kv_cache, hidden_TE)
        self._hidden_PE = result_TE[self._batch.logit_indices]
        self._place_R[rows_P] = np.arange(len(rows_P))

    # --- Drafts

    def propose(self, wanted: Sequence[tuple[int, int]]) -> Drafts:
        rows, drafts = self._rows, Drafts()
        most: dict[int, int] = {}
        for row, count in wanted:
            left = rows.max_model_len - int(rows.num_tokens_R[row])
            count = min(count, self._max_drafts, left)
            if count > 0 and self._place_R[row] != _NOT_FOLLOWED:
                most[row], drafts[row] = count, []
        going_D = np.array([*most], np.int64)
        spares = {row: self._first_spare + index * self._num_spare for index, row in enumerate(most)}
        hidden_DE = self._hidden_PE[torch.from_numpy(self._place_R[going_D])]
        while len(going_D):
            token_ids_D = self._choose(going_D, [drafts[row] for row in going_D.tolist()], hidden_DE)
            for row, token in zip(going_D.tolist(), token_ids_D.tolist(), strict=True):
                if token >= 0:
                    drafts[row].append(token)
            goes_on = [
                index
                for index, (row, token) in enumerate(zip(going_D.tolist(), token_ids_D.tolist(), strict=True))
                if token >= 0 and len(drafts[row]) < most[row] and token not in rows.sampling.eos_token_ids
            ]
            going_D = going_D[goes_on]
            if len(going_D):
                self._fill_chain(going_D, drafts, spares)
                hidden_DE = self._head.forward(self._batch, self._kv_cache, hidden_DE[goes_on]).clone()
        return {row: each for row, each in drafts.items() if each}

    def _choose(self, rows_D: np.ndarray, drafts: Sequence[Sequence[int]], hidden_DE: torch.Tensor) -> np.ndarray:
        """Returns the token that each row would draw from the head's logits; -1: none."""
        sampling = self._rows.sampling
        if not sampling.needs_logits(rows_D) and not sampling.constrains(rows_D):
            token_ids_D, largest_D = (each.numpy() for each in self._head.likeliest(hidden_DE))
            broken_D = ~np.isfinite(largest_D)
            token_ids_D = np.where(broken_D, -1, token_ids_D)
        else:
            logits_DV = self._head.logits(hidden_DE).numpy()
            # Tokens that the head can't draft have -inf.
            broken_D = np.isnan(logits_DV).any(axis=1) | (logits_DV == np.inf).any(axis=1)
            logits_DV[broken_D] = 0.0
            token_ids_D = drawn(self._rows, rows_D, drafts, logits_DV, self._head.backend.native)
            token_ids_D[broken_D] = -1
        if broken_D.any():
            self._clean(rows_D[broken_D])
        return token_ids_D

    def _fill_chain(self, rows_D: np.ndarray, drafts: Drafts, spares: dict[int, int]) -> None:
        """Fills the batch with the last draft of each row, one position behind the one before."""
        rows, size = self._rows, self._rows.block_size
        last = [drafts[row] for row in rows_D.tolist()]
        positions_D = self._positions_P[self._place_R[rows_D]] + [len(each) for each in last]
        width = int(positions_D.max()) // size + 1
        places_B = np.arange(width)
        num_own_D = rows.num_blocks_R[rows_D]
        own_DB = rows.block_ids_RB[rows_D[:, None], np.minimum(places_B, rows.block_ids_RB.shape[1] - 1)]
        first_spare_D = np.array([spares[row] for row in rows_D.tolist()])
        # Beyond the spare blocks of a row its table is not read.
        offset_DB = np.clip(places_B - num_own_D[:, None], 0, self._num_spare - 1)
        tables_DB = np.where(places_B < num_own_D[:, None], own_DB, first_spare_D[:, None] + offset_DB)
        blocks_D = tables_DB[np.arange(len(rows_D)), positions_D // size].astype(np.int64)
        self._batch.fill(
            token_ids_T=np.array([each[-1] for each in last], np.int64),
            positions_T=positions_D,
            slots_T=blocks_D * size + positions_D % size,
            query_starts=np.arange(len(rows_D) + 1),
            context_lens_S=positions_D + 1,
            block_tables_SB=tables_DB,
            logit_indices=np.arange(len(rows_D)),
        )

    def _clean(self, rows_D: np.ndarray) -> None:
        """Zeroes the head's blocks of rows for which it computes numbers that are not finite, where they hold some:
        attention gives masked entries weight 0, and 0 * NaN is NaN. Other blocks may be shared with rows that are well.
        These rows get no drafts in this step."""
        rows = self._rows
        own = [rows.block_ids_RB[row, : rows.num_blocks_R[row]] for row in rows_D.tolist()]
        spare = np.arange(self._first_spare, self._kv_cache.num_blocks)
        blocks = torch.from_numpy(np.concatenate((*own, spare)).astype(np.int64))
        for layer in self._kv_cache.layers:
            layer[blocks[~layer[blocks].float().isfinite().flatten(1).all(dim=1)]] = 0
        self._place_R[rows_D] = _NOT_FOLLOWED


def spare_blocks_of_row(max_drafts: int, block_size: int) -> int:
    """Returns the blocks that a row may need for the passes of a chain, which run ahead of its own blocks."""
    return -(-max_drafts // block_size)


def _part(states: TargetStates, known: np.ndarray) -> TargetStates:
    """Returns the states of some tokens."""
    if len(known) == len(states.last_TE):
        return states
    index = torch.from_numpy(known)
    return TargetStates(last_TE=states.last_TE[index], kept=[each[index] for each in states.kept])
