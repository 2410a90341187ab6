"""Chooses a step's tokens on the GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.sampling.triton_verify import verify
from kernels.step_inputs.triton import remember_tokens
from worker.device.staging import Part, StepSlot
from worker.gpu.pending import AskedLogprobs, DeviceRows, ResultLayout
from worker.sampling.feature import Positions, Staged, Table
from worker.sampling.features import AdjustedPositions, AdjustmentTables, RowSampling
from worker.sampling.filters import DeviceFilters, SamplingKind
from worker.sampling.gpu_logprobs import SLICE, write_logprobs
from worker.step.inputs import StepInputs

# New rows, staged for the device: their filters, and their entries in the features' tables.
StagedRows = tuple[Sequence[Part], Sequence[tuple[Table[Any], Staged]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDrafts:
    """The drafts of a step. int32."""

    most: int  # of a row
    starts_N1: np.ndarray  # row i's positions are starts_N1[i] : starts_N1[i + 1]
    inputs_L: np.ndarray  # the token at each position: the row's last one, then its drafts
    drafts_LD: np.ndarray  # the row's drafts before each position; -1 where there are fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPositions:
    """The positions of a step at which tokens are sampled."""

    rows_N: np.ndarray  # int32
    rows_L: np.ndarray  # int32
    output_positions_L: np.ndarray  # int32, of the token that is chosen
    tokens_L: np.ndarray  # int64, indices into T
    drafts: RowDrafts | None = None

    @classmethod
    def of(cls, inputs: StepInputs) -> "ScoredPositions":
        rows_N = inputs.rows_S[inputs.sampling_N]
        last_N = inputs.query_starts[1:][inputs.sampling_N].astype(np.int64) - 1
        if inputs.num_drafts_N is None:
            return cls(rows_N=rows_N, rows_L=rows_N, output_positions_L=inputs.output_positions_N, tokens_L=last_N)
        counts_N = inputs.num_drafts_N.astype(np.int64)
        num_drafts = int(counts_N.max(initial=0))
        row_L = np.arange(len(rows_N)).repeat(counts_N + 1)
        starts_N1 = np.concatenate(([0], (counts_N + 1).cumsum()))
        turn_L = np.arange(len(row_L)) - starts_N1[row_L]
        tokens_L = (last_N - counts_N)[row_L] + turn_L
        turns_D = np.arange(num_drafts)
        is_draft_ND = turns_D < counts_N[:, None]
        places_ND = (last_N - counts_N + 1)[:, None] + turns_D
        drafts_ND = np.where(is_draft_ND, inputs.token_ids_T[np.where(is_draft_ND, places_ND, 0)], np.int32(-1))
        return cls(
            rows_N=rows_N,
            rows_L=rows_N[row_L],
            output_positions_L=(inputs.output_positions_N[row_L] + turn_L).astype(np.int32),
            tokens_L=tokens_L,
            drafts=RowDrafts(
                most=num_drafts,
                starts_N1=starts_N1.astype(np.int32),
                inputs_L=inputs.token_ids_T[tokens_L],
                drafts_LD=np.where(turns_D < turn_L[:, None], drafts_ND[row_L], np.int32(-1)),
            ),
        )


class Demands:
    """The sampling kind and the logprobs of all rows. Entries of free rows are undefined."""

    def __init__(self, num_rows: int) -> None:
        self._kind_R = np.zeros(num_rows, np.int8)
        # -1: the row wants none.
        self.num_logprobs_R = np.full(num_rows, -1, np.int32)
        # By row: tokens whose logprobs come in the place of the most likely ones.
        self._listed: dict[int, np.ndarray] = {}
        # Rows that are more than greedy, and rows with logprobs; empty in many steps.
        self._drawing_rows: set[int] = set()
        self._asking_rows: set[int] = set()

    def free(self, row: int) -> None:
        self._drawing_rows.discard(row)
        self._asking_rows.discard(row)
        self._listed.pop(row, None)

    def take(self, new: RowSampling) -> None:
        """Stores the demands of a new row."""
        kind = SamplingKind.of(new)
        if kind is not SamplingKind.GREEDY:
            self._drawing_rows.add(new.row)
        self._kind_R[new.row] = kind.value
        self.num_logprobs_R[new.row] = -1 if new.num_logprobs is None else new.num_logprobs
        if new.num_logprobs is not None:
            self._asking_rows.add(new.row)
        if new.listed is not None:
            self._listed[new.row] = new.listed

    def kind(self, rows_N: np.ndarray) -> SamplingKind:
        """Returns the lowest kind that serves all these rows."""
        return SamplingKind(self._kind_R[rows_N].max(initial=0)) if self._drawing_rows else SamplingKind.GREEDY

    def asking(self, rows_L: np.ndarray) -> np.ndarray:
        """Returns the indices of rows that want logprobs."""
        return np.flatnonzero(self.num_logprobs_R[rows_L] >= 0) if self._asking_rows else rows_L[:0].astype(np.int64)

    def listed(self, rows_Q: np.ndarray, num_top: int) -> np.ndarray | None:
        """Returns the listed tokens of these rows: int64 [Q, num_top], -1 in unused places; None: no row has any."""
        if self._listed.keys().isdisjoint(rows_Q.tolist()):
            return None
        listed_QK = np.full((len(rows_Q), num_top), -1, np.int64)
        for line, row in zip(listed_QK, rows_Q.tolist(), strict=True):
            listed = self._listed.get(row, line[:0])
            line[: len(listed)] = listed
        return listed_QK


# Indices, int64, relative to the slice's start; the place of the first among the step's logprobs; listed tokens.
StagedAsked = tuple[Part, int, Part | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSlice:
    """Positions start : end of a step, whose logits exist at once. Its adjusted positions, and those with logprobs, are
    split into parts of SLICE."""

    start: int
    end: int
    adjusted: Sequence[AdjustedPositions]
    asked: Sequence[StagedAsked]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """The sampling inputs of one step, staged for the device."""

    kind: SamplingKind
    slices: Sequence[LogitsSlice]
    # -1 where the logits are adjusted.
    sampled_rows_L: np.ndarray
    # inputs_L, starts_N1. None: there are no drafts, or they are verified by `verify_decodes`.
    drafts: tuple[Part, Part] | None
    # Inputs of `Table.count`, for tables that depend on sampled tokens.
    counts: Sequence[tuple[Table[Any], Part]]
    asked: AskedLogprobs | None


class Sampler:
    """Chooses the tokens of all permanent rows."""

    def __init__(
        self,
        device: torch.device,
        rows: DeviceRows,
        *,
        max_rows: int,
        max_tokens: int,
        vocab_size: int,
        most_drafts: int = 0,
    ) -> None:
        """most_drafts: drafts of a row that `verify_decodes` can verify."""
        self._rows, self._vocab_size = rows, vocab_size
        self._demands = Demands(max_rows)
        self._adjustments = AdjustmentTables(device, num_rows=max_rows, vocab_size=vocab_size)
        self._filters = DeviceFilters(device, max_rows)
        # The token chosen at each position.
        self.tokens_L = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._ones_N = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._said_RD1 = torch.zeros(max_rows, most_drafts + 1, dtype=torch.int32, device=device)
        self._counts_R = torch.zeros(max_rows, dtype=torch.int32, device=device)

    # --- On the host, before the step is sent.

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._demands.free(row)
            self._adjustments.free(row)

    def stage_rows(self, new_rows: Sequence[RowSampling], slot: StepSlot) -> StagedRows | None:
        """Stages new rows, which must be free, for `write_rows`; None: there are none."""
        for new in new_rows:
            self._demands.take(new)
        if not new_rows:
            return None
        adjustments = [(new.row, new.adjustments) for new in new_rows]
        return self._filters.add(new_rows, slot), self._adjustments.add(adjustments, slot)

    def stage(
        self, scored: ScoredPositions, slot: StepSlot, slice_size: int, *, only_decodes: bool = False
    ) -> StepSampling:
        """Stages the sampling inputs of a step. slice_size: positions whose logits exist at once. only_decodes: its
        drafts are verified by `verify_decodes`."""
        adjusts_L = self._adjustments.needed(scored.rows_L, scored.output_positions_L)
        asked_Q = self._demands.asking(scored.rows_L)
        num_top = self._num_top(scored.rows_L[asked_Q]) if len(asked_Q) else 0
        drafts = scored.drafts
        return StepSampling(
            kind=self._demands.kind(scored.rows_N),
            slices=[
                LogitsSlice(
                    start=start,
                    end=min(start + slice_size, len(scored.rows_L)),
                    adjusted=list(self._stage_adjusted(scored, adjusts_L, start, slice_size, slot)),
                    asked=list(self._stage_asked(scored.rows_L, asked_Q, num_top, start, slice_size, slot)),
                )
                for start in range(0, len(scored.rows_L), slice_size)
            ],
            sampled_rows_L=np.where(adjusts_L, np.int32(-1), scored.rows_L),
            drafts=None if drafts is None or only_decodes else (slot.add(drafts.inputs_L), slot.add(drafts.starts_N1)),
            counts=self._adjustments.stage_counts(scored.rows_N, slot),
            asked=AskedLogprobs(asked_Q, num_top) if len(asked_Q) else None,
        )

    def _stage_adjusted(
        self, scored: ScoredPositions, adjusts_L: np.ndarray, start: int, slice_size: int, slot: StepSlot
    ) -> Iterator[AdjustedPositions]:
        adjusted = start + np.flatnonzero(adjusts_L[start : start + slice_size])
        for first in range(0, len(adjusted), SLICE):
            part = adjusted[first : first + SLICE]
            drafts_AD = None if scored.drafts is None else scored.drafts.drafts_LD[part]
            at = Positions(scored.rows_L[part], scored.output_positions_L[part], drafts_AD)
            yield self._adjustments.stage(part - start, at, slot)

    def _stage_asked(
        self,
        rows_L: np.ndarray,
        asked_Q: np.ndarray,
        num_top: int,
        start: int,
        slice_size: int,
        slot: StepSlot,
    ) -> Iterator[StagedAsked]:
        first, end = np.searchsorted(asked_Q, (start, start + slice_size)).tolist()
        for place in range(first, end, SLICE):
            part_Q = asked_Q[place : min(place + SLICE, end)]
            listed_QK = self._demands.listed(rows_L[part_Q], num_top)
            yield slot.add(part_Q - start), place, None if listed_QK is None else slot.add(listed_QK)

    def _num_top(self, rows_Q: np.ndarray) -> int:
        return min(int(self._demands.num_logprobs_R[rows_Q].max()), self._vocab_size)

    # --- On the device.

    def write_rows(self, staged: StagedRows | None) -> None:
        if staged is not None:
            filters, adjustments = staged
            self._filters.write(filters)
            self._adjustments.write(adjustments)

    def choose_adjusted(self, sampling: StepSampling, part: LogitsSlice, logits_LV: torch.Tensor) -> None:
        """Chooses tokens at the slice's adjusted positions. logits_LV: of the slice; not changed."""
        tokens_L = self.tokens_L[part.start : part.end]
        for positions in part.adjusted:
            logits_AV = logits_LV[positions.indices_A.tensor].float()
            self._adjustments.apply(logits_AV, positions)
            tokens_A = torch.empty(len(logits_AV), dtype=torch.int32, device=logits_AV.device)
            self._filters.apply(
                sampling.kind, logits_AV, positions.rows_A.tensor, positions.positions_A.tensor, tokens_A
            )
            tokens_L.index_copy_(0, positions.indices_A.tensor, tokens_A)

    def choose(
        self,
        kind: SamplingKind,
        logits_LV: torch.Tensor,
        sampled_rows_L: torch.Tensor,
        output_positions_L: torch.Tensor,
        first: int = 0,
    ) -> None:
        """Chooses tokens of a slice that begins with position `first`; leaves positions whose row is -1 as they are."""
        tokens_L = self.tokens_L[first : first + len(logits_LV)]
        self._filters.apply(kind, logits_LV, sampled_rows_L, output_positions_L, tokens_L)

    def take_likeliest(self, ids_L: torch.Tensor, logits_L: torch.Tensor, rows_L: torch.Tensor, first: int = 0) -> None:
        """Replaces `choose` for greedy rows whose likeliest tokens are known: int64 ids, and their float32 logits."""
        tokens_L = self.tokens_L[first : first + len(ids_L)]
        chosen_L = torch.where(logits_L.isfinite(), ids_L, -1).int()
        tokens_L.copy_(torch.where(rows_L >= 0, chosen_L, tokens_L))

    def score(self, part: LogitsSlice, logits_LV: torch.Tensor, layout: ResultLayout, results: torch.Tensor) -> None:
        """Writes logprobs of the chosen tokens to the results."""
        tokens_L = self.tokens_L[part.start : part.end]
        for indices_Q, first, listed_QK in part.asked:
            # -1 marks a row whose logits were not finite; its logprobs are never read.
            chosen_Q = tokens_L[indices_Q.tensor].long().clamp_(min=0)
            write_logprobs(
                logits_LV[indices_Q.tensor],
                chosen_Q,
                layout.sampled_of(results),
                first,
                None if listed_QK is None else listed_QK.tensor,
            )

    def remember(self, rows_N: torch.Tensor) -> None:
        """Stores the last tokens of rows without drafts, which have one position each."""
        remember_tokens(self._rows.last_tokens_R, rows_N, self.tokens_L[: len(rows_N)])

    def verify(self, sampling: StepSampling, rows_N: torch.Tensor, layout: ResultLayout, results: torch.Tensor) -> None:
        """Verifies drafts: writes the rows' tokens to the results, and stores each row's last one."""
        assert sampling.drafts is not None
        inputs_L, starts_N1 = (part.tensor for part in sampling.drafts)
        tokens_ND1, counts_N = layout.tokens_of(results), layout.counts_of(results)
        verify(self.tokens_L, inputs_L, starts_N1, tokens_ND1, counts_N)
        remember_tokens(self._rows.last_tokens_R, rows_N, tokens_ND1, counts_N)

    def verify_decodes(self, rows_S: torch.Tensor, query_starts: torch.Tensor, token_ids_T: torch.Tensor) -> None:
        """Verifies the drafts of a step whose tokens are all scored, in memory at fixed addresses, and stores each
        row's last token. `take_verified` copies the outputs."""
        num_rows = len(rows_S)
        said_ND1, counts_N = self._said_RD1[:num_rows], self._counts_R[:num_rows]
        verify(self.tokens_L, token_ids_T, query_starts, said_ND1, counts_N)
        remember_tokens(self._rows.last_tokens_R, rows_S, said_ND1, counts_N)

    def take_verified(self, layout: ResultLayout, results: torch.Tensor) -> None:
        """Writes what `verify_decodes` found to the results."""
        layout.tokens_of(results).copy_(self._said_RD1[: layout.num_rows, : layout.width])
        layout.counts_of(results).copy_(self._counts_R[: layout.num_rows])

    def finish(self, sampling: StepSampling, layout: ResultLayout, results: torch.Tensor) -> None:
        """Writes the tokens to the results, and counts them in features that depend on them."""
        tokens_ND1 = layout.tokens_of(results)
        if not (layout.has_counts or layout.is_only_tokens):
            tokens_ND1.copy_(self.tokens_L[: layout.num_rows, None])
        for table, places_N in sampling.counts:
            counts_N = layout.counts_of(results) if layout.has_counts else self._ones_N[: layout.num_rows]
            table.count(places_N, tokens_ND1, counts_N)
