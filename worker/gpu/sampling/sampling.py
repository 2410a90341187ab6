"""Choosing a step's tokens on the device.

The host decides beforehand what that takes (`Sampler.stage`). Then, for each slice of the scored positions whose logits
exist at once, tokens of rows whose logits are adjusted are chosen from copies (`choose_adjusted`), all others from the
model's own logits (`choose`), which are left as they are for logprobs (`score`). At last rows remember what they have
said (`finish`).

Shape suffixes: N sampling rows, L scored positions, A adjusted ones, Q ones with logprobs, D drafts of the longest row,
V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.gpu import sample
from kernels.sampling.gpu_verify import verify
from kernels.step_inputs.gpu import remember_tokens
from worker.gpu.device_rows import DeviceRows
from worker.gpu.pending import AskedLogprobs, ResultLayout
from worker.gpu.sampling.adjustments import AdjustedPositions, Adjustments
from worker.gpu.sampling.demands import Demands, SamplingKind
from worker.gpu.sampling.logprobs import SLICE, write_logprobs
from worker.gpu.sampling.positions import ScoredPositions
from worker.gpu.sampling.tables import Staged
from worker.gpu.staging import Part, StepSlot
from worker.gpu.step_inputs import RowSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSlice:
    """Positions start : end, whose logits exist at once. Of adjusted and asked ones SLICE at a time."""

    start: int
    end: int
    adjusted: Sequence[AdjustedPositions]
    # int64 indices, from start on, and the place of the first among the step's logprobs.
    asked: Sequence[tuple[Part, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """What one step takes, on its way to the device."""

    kind: SamplingKind
    slices: Sequence[LogitsSlice]
    # Where a row is adjusted: -1.
    sampled_rows_L: np.ndarray
    # starts_N, counts_N, drafts_ND.
    drafts: tuple[Part, Part, Part] | None
    # Of the tables of penalties.
    count_places_N: Part | None
    asked: AskedLogprobs | None


class Sampler:
    """Of all permanent rows."""

    def __init__(self, device: torch.device, rows: DeviceRows, *, max_rows: int, max_tokens: int, vocab_size: int):
        self._rows, self._vocab_size = rows, vocab_size
        self._demands = Demands(max_rows)
        self._adjustments = Adjustments(device, num_rows=max_rows, vocab_size=vocab_size)
        # What was chosen at each position.
        self.tokens_L = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._ones_N = torch.ones(max_rows, dtype=torch.int32, device=device)

    # --- On the host, before the step is sent.

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._demands.free(row)
            self._adjustments.free(row)

    def stage_rows(self, new_rows: Sequence[RowSampling], slot: StepSlot) -> Sequence[tuple[int, Staged]]:
        """Rows that are free; for `write_rows`."""
        for new in new_rows:
            self._demands.take(new)
        return self._adjustments.stage(new_rows, slot) if new_rows else ()

    def stage(self, scored: ScoredPositions, slot: StepSlot, slice_size: int) -> StepSampling:
        """slice_size: positions whose logits exist at once."""
        adjusts_L = self._adjustments.needed(scored.rows_L, scored.output_positions_L)
        asked_Q = self._demands.asking(scored.rows_L)
        drafts = scored.drafts
        return StepSampling(
            kind=self._demands.kind(scored.rows_N),
            slices=[
                LogitsSlice(
                    start=start,
                    end=min(start + slice_size, len(scored.rows_L)),
                    adjusted=list(self._stage_adjusted(scored, adjusts_L, start, slice_size, slot)),
                    asked=list(_stage_asked(asked_Q, start, slice_size, slot)),
                )
                for start in range(0, len(scored.rows_L), slice_size)
            ],
            sampled_rows_L=np.where(adjusts_L, np.int32(-1), scored.rows_L),
            drafts=drafts
            and (slot.add(drafts.starts_N), slot.add(drafts.counts_N), slot.add(drafts.drafts_ND)),
            count_places_N=self._adjustments.stage_counts(scored.rows_N, slot),
            asked=AskedLogprobs(asked_Q, self._num_top(scored.rows_L[asked_Q])) if len(asked_Q) else None,
        )  # fmt: skip

    def _stage_adjusted(
        self, scored: ScoredPositions, adjusts_L: np.ndarray, start: int, slice_size: int, slot: StepSlot
    ) -> Iterator[AdjustedPositions]:
        adjusted = start + np.flatnonzero(adjusts_L[start : start + slice_size])
        for first in range(0, len(adjusted), SLICE):
            part = adjusted[first : first + SLICE]
            yield self._adjustments.stage_positions(
                part - start,
                scored.rows_L[part],
                scored.output_positions_L[part],
                None if scored.drafts is None else scored.drafts.drafts_LD[part],
                slot,
            )

    def _num_top(self, rows_Q: np.ndarray) -> int:
        return min(int(self._demands.num_logprobs_R[rows_Q].max()), self._vocab_size)

    # --- On the device.

    def write_rows(self, staged: Sequence[tuple[int, Staged]]) -> None:
        self._adjustments.write(staged)

    def choose_adjusted(self, sampling: StepSampling, part: LogitsSlice, logits_LV: torch.Tensor) -> None:
        """logits_LV: of the slice; not changed."""
        tokens_L = self.tokens_L[part.start : part.end]
        for positions in part.adjusted:
            logits_AV = logits_LV[positions.indices_A.tensor].float()
            self._adjustments.apply(logits_AV, positions)
            tokens_A = torch.empty(len(logits_AV), dtype=torch.int32, device=logits_AV.device)
            self._sample(sampling.kind, logits_AV, positions.rows_A.tensor, positions.positions_A.tensor, tokens_A)
            tokens_L.index_copy_(0, positions.indices_A.tensor, tokens_A)

    def choose(
        self,
        kind: SamplingKind,
        logits_LV: torch.Tensor,
        sampled_rows_L: torch.Tensor,
        output_positions_L: torch.Tensor,
        first: int = 0,
    ) -> None:
        """Of a slice that begins with position `first`; positions whose row is -1 are left as they are."""
        tokens_L = self.tokens_L[first : first + len(logits_LV)]
        self._sample(kind, logits_LV, sampled_rows_L, output_positions_L, tokens_L)

    def take_likeliest(self, ids_L: torch.Tensor, logits_L: torch.Tensor, rows_L: torch.Tensor, first: int = 0) -> None:
        """`choose` of greedy rows, for which this was found already: int64 ids, and their float32 logits."""
        tokens_L = self.tokens_L[first : first + len(ids_L)]
        chosen_L = torch.where(logits_L.isfinite(), ids_L, -1).int()
        tokens_L.copy_(torch.where(rows_L >= 0, chosen_L, tokens_L))

    def score(self, part: LogitsSlice, logits_LV: torch.Tensor, layout: ResultLayout, results: torch.Tensor) -> None:
        """Logprobs of what was chosen, into the results."""
        tokens_L = self.tokens_L[part.start : part.end]
        for indices_Q, first in part.asked:
            # -1 where there was no choice; whatever is written there is of no use.
            chosen_Q = tokens_L[indices_Q.tensor].long().clamp_(min=0)
            write_logprobs(logits_LV[indices_Q.tensor], chosen_Q, layout.sampled_of(results), first)

    def remember(self, rows_N: torch.Tensor) -> None:
        """Of rows without drafts: one position each."""
        remember_tokens(self._rows.last_tokens_R, rows_N, self.tokens_L[: len(rows_N)])

    def verify(self, sampling: StepSampling, rows_N: torch.Tensor, layout: ResultLayout, results: torch.Tensor) -> None:
        """Of rows with drafts: what they say, into the results, and remembered."""
        assert sampling.drafts is not None
        starts_N, num_drafts_N, drafts_ND = (part.tensor for part in sampling.drafts)
        tokens_ND1, counts_N = layout.tokens_of(results), layout.counts_of(results)
        verify(self.tokens_L, starts_N, num_drafts_N, drafts_ND, tokens_ND1, counts_N)
        remember_tokens(self._rows.last_tokens_R, rows_N, tokens_ND1, counts_N)

    def finish(self, sampling: StepSampling, layout: ResultLayout, results: torch.Tensor) -> None:
        """Puts the tokens into the results, and counts them for rows with penalties."""
        tokens_ND1 = layout.tokens_of(results)
        if not (layout.has_counts or layout.is_only_tokens):
            tokens_ND1.copy_(self.tokens_L[: layout.num_rows, None])
        if sampling.count_places_N is not None:
            counts_N = layout.counts_of(results) if layout.has_counts else self._ones_N[: layout.num_rows]
            self._adjustments.count(sampling.count_places_N, tokens_ND1, counts_N)

    def _sample(
        self,
        kind: SamplingKind,
        logits_LV: torch.Tensor,
        rows_L: torch.Tensor,
        positions_L: torch.Tensor,
        tokens_L: torch.Tensor,
    ) -> None:
        sample(
            logits_LV, rows_L, positions_L, self._rows.columns, tokens_L,
            draws=kind is not SamplingKind.GREEDY, filters=kind is SamplingKind.FILTERS,
        )  # fmt: skip


def _stage_asked(asked_Q: np.ndarray, start: int, slice_size: int, slot: StepSlot) -> Iterator[tuple[Part, int]]:
    first, end = np.searchsorted(asked_Q, (start, start + slice_size)).tolist()
    for place in range(first, end, SLICE):
        yield slot.add(asked_Q[place : min(place + SLICE, end)] - start), place
