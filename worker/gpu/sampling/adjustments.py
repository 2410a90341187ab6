"""Adjustments of logits on the device: of which rows, and in which order.

Shape suffixes: A adjusted positions, N sampling rows, V vocabulary, D drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.gpu.sampling.tables import BanTable, BiasTable, New, PenaltyTable, Staged
from worker.gpu.staging import Part, StepSlot
from worker.gpu.step_inputs import RowSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustedPositions:
    """Some positions of a step, on their way to the device. Places of tables: None if no position has one."""

    # int64, among the logits that they are taken from.
    indices_A: Part
    rows_A: Part
    positions_A: Part
    bias_places_A: Part | None
    penalty_places_A: Part | None
    # Drafts before the position, if there are any: they count as output.
    drafts_AD: Part | None
    ban_places_A: Part | None


class Adjustments:
    """Logit bias, then penalties, then bans of min_tokens, as kernels.sampling.gpu_adjust says, for the rows that want
    them."""

    def __init__(self, device: torch.device, *, num_rows: int, vocab_size: int) -> None:
        self._bias = BiasTable(device, num_rows)
        self._penalties = PenaltyTable(device, num_rows, vocab_size)
        self._bans = BanTable(device, num_rows)
        self._tables = (self._bias, self._penalties, self._bans)
        # Of rows with a place in any table: in most steps there are none.
        self._rows: set[int] = set()

    def free(self, row: int) -> None:
        self._rows.discard(row)
        for table in self._tables:
            table.places.give_back(row)

    def stage(self, new_rows: Sequence[RowSampling], slot: StepSlot) -> list[tuple[int, Staged]]:
        """Takes new rows along, which are free; for `write`."""
        new: list[New] = [(each.row, each.adjustments) for each in new_rows if each.adjustments is not None]
        staged: list[tuple[int, Staged]] = []
        for index, table in enumerate(self._tables):
            its_own = [(row, adjustments) for row, adjustments in new if table.is_for(adjustments)]
            for row, _ in its_own:
                table.places.take(row)
                self._rows.add(row)
            if its_own:
                staged.append((index, table.stage(its_own, slot)))
        return staged

    def write(self, staged: Sequence[tuple[int, Staged]]) -> None:
        for index, what in staged:
            self._tables[index].write(what)

    def needed(self, rows_L: np.ndarray, positions_L: np.ndarray) -> np.ndarray:
        """Which positions (of the output) have their logits adjusted: bool [L]."""
        if not self._rows:
            return np.zeros(len(rows_L), np.bool_)
        always = (self._bias.places.of_R[rows_L] >= 0) | (self._penalties.places.of_R[rows_L] >= 0)
        return always | self._bans_apply(rows_L, positions_L)

    def stage_positions(
        self,
        indices_A: np.ndarray,
        rows_A: np.ndarray,
        positions_A: np.ndarray,
        drafts_AD: np.ndarray | None,
        slot: StepSlot,
    ) -> AdjustedPositions:
        """drafts_AD: -1 where there are fewer than D."""

        def places(of_R: np.ndarray, apply: np.ndarray | bool = True) -> Part | None:
            places_A = np.where(apply, of_R[rows_A], np.int32(-1))
            return slot.add(places_A) if (places_A >= 0).any() else None

        penalty_places_A = places(self._penalties.places.of_R)
        return AdjustedPositions(
            indices_A=slot.add(indices_A.astype(np.int64)),
            rows_A=slot.add(rows_A),
            positions_A=slot.add(positions_A),
            bias_places_A=places(self._bias.places.of_R),
            penalty_places_A=penalty_places_A,
            drafts_AD=None if drafts_AD is None or penalty_places_A is None else slot.add(drafts_AD),
            ban_places_A=places(self._bans.places.of_R, self._bans_apply(rows_A, positions_A)),
        )

    def apply(self, logits_AV: torch.Tensor, positions: AdjustedPositions) -> None:
        """logits_AV: float32, changed in place."""
        if positions.bias_places_A is not None:
            self._bias.apply(logits_AV, positions.bias_places_A.tensor)
        if positions.penalty_places_A is not None:
            drafts = positions.drafts_AD
            self._penalties.apply(
                logits_AV, positions.penalty_places_A.tensor, None if drafts is None else drafts.tensor
            )
        if positions.ban_places_A is not None:
            self._bans.apply(logits_AV, positions.ban_places_A.tensor, positions.positions_A.tensor)

    def stage_counts(self, rows_N: np.ndarray, slot: StepSlot) -> Part | None:
        """For `count`; None: no row's output is counted."""
        places_N = self._penalties.places.of_R[rows_N] if self._rows else rows_N[:0]
        return slot.add(places_N) if (places_N >= 0).any() else None

    def count(self, places_N: Part, tokens_ND1: torch.Tensor, counts_N: torch.Tensor) -> None:
        """Counts what rows have said: tokens_ND1[n, : counts_N[n]]."""
        self._penalties.count(places_N.tensor, tokens_ND1, counts_N)

    def _bans_apply(self, rows_L: np.ndarray, positions_L: np.ndarray) -> np.ndarray:
        return (self._bans.places.of_R[rows_L] >= 0) & (positions_L < self._bans.min_tokens_R[rows_L])
