"""Logit bias, penalties and min_tokens on the GPU: a table each, with a place for every row that needs one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.triton_adjust import add_logit_bias, apply_penalties, ban_tokens, count_output
from worker.device.staging import Part, StepSlot
from worker.sampling.adjustments import Adjustments, RowSampling

# The least number of places, and of a list's entries.
_LEAST_PLACES = 4
_LEAST_ENTRIES = 16

# A new row, and what it came with.
New = tuple[int, Adjustments]
# Places of new rows, int64, and what is written there.
Staged = tuple[Part, Sequence[Part]]


class Places:
    """Which place of a table is a row's."""

    def __init__(self, num_rows: int) -> None:
        # -1: the row has none.
        self.of_R = np.full(num_rows, -1, np.int32)
        self._free: list[int] = []
        # That the table must have.
        self.count = 0

    def take(self, row: int) -> None:
        assert self.of_R[row] < 0, "a row is freed before it is new again"
        if not self._free:
            self._free.append(self.count)
            self.count += 1
        self.of_R[row] = self._free.pop()

    def give_back(self, row: int) -> None:
        if self.of_R[row] >= 0:
            self._free.append(int(self.of_R[row]))
            self.of_R[row] = -1

    def stage(self, new: Sequence[New], slot: StepSlot) -> Part:
        """As torch indexes with them."""
        return slot.add(self.of_R[[row for row, _ in new]].astype(np.int64))


class BiasTable:
    """add_logit_bias."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self.places = Places(num_rows)
        self._token_ids_PK = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._bias_PK = torch.empty(0, 0, device=device)

    @staticmethod
    def is_for(adjustments: Adjustments) -> bool:
        return len(adjustments.bias_token_ids) > 0

    def stage(self, new: Sequence[New], slot: StepSlot) -> Staged:
        token_ids = [adjustments.bias_token_ids for _, adjustments in new]
        width = _width(token_ids, self._token_ids_PK)
        bias_MK = _padded([adjustments.bias for _, adjustments in new], width, np.float32, 0)
        return self.places.stage(new, slot), [slot.add(_padded(token_ids, width, np.int32, -1)), slot.add(bias_MK)]

    def write(self, staged: Staged) -> None:
        places, (token_ids, bias) = staged
        size = self.places.count, token_ids.array.shape[1]
        self._token_ids_PK = _grown(self._token_ids_PK, *size, fill=-1)
        self._bias_PK = _grown(self._bias_PK, *size)
        self._token_ids_PK.index_copy_(0, places.tensor, token_ids.tensor)
        self._bias_PK.index_copy_(0, places.tensor, bias.tensor)

    def apply(self, logits_AV: torch.Tensor, places_A: torch.Tensor) -> None:
        add_logit_bias(logits_AV, places_A, self._token_ids_PK, self._bias_PK)


class BanTable:
    """ban_tokens."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        self.places = Places(num_rows)
        # What the host knows of it: rows that have said enough need nothing more.
        self.min_tokens_R = np.zeros(num_rows, np.int32)
        self._min_tokens_P1 = torch.empty(0, 1, dtype=torch.int32, device=device)
        self._token_ids_PK = torch.empty(0, 0, dtype=torch.int32, device=device)

    @staticmethod
    def is_for(adjustments: Adjustments) -> bool:
        return adjustments.min_tokens > 0 and len(adjustments.banned_token_ids) > 0

    def stage(self, new: Sequence[New], slot: StepSlot) -> Staged:
        for row, adjustments in new:
            self.min_tokens_R[row] = adjustments.min_tokens
        token_ids = [adjustments.banned_token_ids for _, adjustments in new]
        token_ids_MK = _padded(token_ids, _width(token_ids, self._token_ids_PK), np.int32, -1)
        min_tokens_M1 = np.array([[adjustments.min_tokens] for _, adjustments in new], np.int32)
        return self.places.stage(new, slot), [slot.add(min_tokens_M1), slot.add(token_ids_MK)]

    def write(self, staged: Staged) -> None:
        places, (min_tokens, token_ids) = staged
        self._min_tokens_P1 = _grown(self._min_tokens_P1, self.places.count, 1)
        self._token_ids_PK = _grown(self._token_ids_PK, self.places.count, token_ids.array.shape[1], fill=-1)
        self._min_tokens_P1.index_copy_(0, places.tensor, min_tokens.tensor)
        self._token_ids_PK.index_copy_(0, places.tensor, token_ids.tensor)

    def apply(self, logits_AV: torch.Tensor, places_A: torch.Tensor, positions_A: torch.Tensor) -> None:
        ban_tokens(logits_AV, places_A, positions_A, self._min_tokens_P1.view(-1), self._token_ids_PK)


class PenaltyTable:
    """apply_penalties; counts follow what rows say."""

    def __init__(self, device: torch.device, num_rows: int, vocab_size: int) -> None:
        self.places = Places(num_rows)
        self._num_words, self._vocab_size = -(-vocab_size // 32), vocab_size
        # Repetition, presence, frequency.
        self._penalties_3P = torch.empty(3, 0, device=device)
        self._prompt_mask_PW = torch.empty(0, self._num_words, dtype=torch.int32, device=device)
        # Half a MiB a place for a vocabulary of 128,256.
        self._output_counts_PV = torch.empty(0, vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def is_for(adjustments: Adjustments) -> bool:
        return (adjustments.repetition, adjustments.presence, adjustments.frequency) != (1.0, 0.0, 0.0)

    def stage(self, new: Sequence[New], slot: StepSlot) -> Staged:
        penalties = [(each.repetition, each.presence, each.frequency) for _, each in new]
        masks_MW = np.stack([self._bits(each.prompt_token_ids) for _, each in new])
        said = [np.unique(each.output_token_ids, return_counts=True) for _, each in new]
        places_MU = [
            int(self.places.of_R[row]) * self._vocab_size + tokens.astype(np.int64)
            for (row, _), (tokens, _) in zip(new, said, strict=True)
        ]
        counts_MU = [counts.astype(np.int32) for _, counts in said]
        return self.places.stage(new, slot), [
            slot.add(np.array(penalties, np.float32).T),
            slot.add(masks_MW),
            slot.add(np.concatenate(places_MU)),
            slot.add(np.concatenate(counts_MU)),
        ]

    def write(self, staged: Staged) -> None:
        places, (penalties, masks, said_places, said_counts) = staged
        count = self.places.count
        self._penalties_3P = _grown(self._penalties_3P, 3, count)
        self._prompt_mask_PW = _grown(self._prompt_mask_PW, count, self._num_words)
        self._output_counts_PV = _grown(self._output_counts_PV, count, self._vocab_size)
        self._penalties_3P.index_copy_(1, places.tensor, penalties.tensor)
        self._prompt_mask_PW.index_copy_(0, places.tensor, masks.tensor)
        self._output_counts_PV.index_fill_(0, places.tensor, 0)
        self._output_counts_PV.view(-1).scatter_(0, said_places.tensor, said_counts.tensor)

    def apply(self, logits_AV: torch.Tensor, places_A: torch.Tensor, drafts_AD: torch.Tensor | None) -> None:
        repetition_P, presence_P, frequency_P = self._penalties_3P
        apply_penalties(
            logits_AV, places_A, self._prompt_mask_PW, self._output_counts_PV,
            repetition_R=repetition_P, presence_R=presence_P, frequency_R=frequency_P, drafts_LD=drafts_AD,
        )  # fmt: skip

    def count(self, places_N: torch.Tensor, tokens_ND1: torch.Tensor, counts_N: torch.Tensor) -> None:
        """What rows have said, see count_output."""
        count_output(self._output_counts_PV, places_N, tokens_ND1, counts_N)

    def _bits(self, token_ids: np.ndarray) -> np.ndarray:
        is_there = np.zeros(32 * self._num_words, np.bool_)
        is_there[token_ids] = True
        return np.packbits(is_there, bitorder="little").view("<i4")


def _width(lists: Sequence[np.ndarray], table_PK: torch.Tensor) -> int:
    """Entries of the table's lists once these are among them."""
    longest = max(map(len, lists))
    return max(_LEAST_ENTRIES, 1 << (longest - 1).bit_length(), table_PK.shape[1])


def _padded(lists: Sequence[np.ndarray], width: int, dtype: type[np.generic], fill: float) -> np.ndarray:
    """[lists, width]."""
    padded = np.full((len(lists), width), fill, dtype)
    for line, values in zip(padded, lists, strict=True):
        line[: len(values)] = values
    return padded


def _grown(table: torch.Tensor, *least: int, fill: float = 0) -> torch.Tensor:
    """The table or, if it is too small in a dim, a copy that is a power of 2 there."""
    if all(size >= wanted for size, wanted in zip(table.shape, least, strict=True)):
        return table
    shape = [
        size if size >= wanted else max(_LEAST_PLACES, 1 << (wanted - 1).bit_length())
        for size, wanted in zip(table.shape, least, strict=True)
    ]
    larger = torch.full(shape, fill, dtype=table.dtype, device=table.device)
    larger[tuple(slice(size) for size in table.shape)] = table
    return larger


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


class AdjustmentTables:
    """Logit bias, then penalties, then bans of min_tokens, as kernels.sampling.triton_adjust says, for the rows that
    want them."""

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
