"""repetition_penalty, presence_penalty, frequency_penalty: make tokens that occurred before less likely."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from configs.sampling import BY_NAME
from kernels.sampling import apply_penalties
from worker.device.staging import Part, StepSlot
from worker.sampling.feature import Adjustment, NewRow, Positions, Staged, Table, grown


class Penalties(Adjustment):
    fields = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def __init__(self, numbers: Sequence[float], prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> None:
        """numbers: repetition, presence, frequency. prompt_token_ids, output_token_ids: int32, of the new row."""
        self.repetition, self.presence, self.frequency = numbers
        self.prompt_token_ids, self.output_token_ids = prompt_token_ids, output_token_ids
        # Distinct tokens in order of first sight, and how often each occurs in the output; both grow by doubling.
        self._ids_N = np.empty(0, np.int64)
        self._counts_N = np.empty(0, np.int64)
        # None: not counted yet. It stays None where a GPU samples and counts by itself.
        self._index: dict[int, int] | None = None

    @classmethod
    def add(cls, new: NewRow) -> Self | None:
        numbers = [BY_NAME[name].value_in(new.sampling) for name in cls.fields]
        if numbers == [BY_NAME[name].default for name in cls.fields]:
            return None
        return cls(numbers, new.prompt.astype(np.int32), new.output.astype(np.int32))

    def apply(self, logits_V: np.ndarray) -> None:
        num_distinct = len(self._counted())
        apply_penalties(
            logits_V,
            self._ids_N[:num_distinct],
            self._counts_N[:num_distinct],
            repetition=self.repetition,
            presence=self.presence,
            frequency=self.frequency,
        )

    def append(self, token_id: int) -> None:
        counted = self._counted()
        index = counted.setdefault(token_id, len(counted))
        if index == len(self._ids_N):
            self._ids_N = np.resize(self._ids_N, max(64, 2 * index))
            self._counts_N = np.concatenate((self._counts_N, np.zeros(len(self._ids_N) - index, np.int64)))
        self._ids_N[index] = token_id
        self._counts_N[index] += 1

    def _counted(self) -> dict[int, int]:
        """Returns each token's index in the counts."""
        if self._index is None:
            prompt, output = self.prompt_token_ids, self.output_token_ids
            distinct, inverse = np.unique(np.concatenate((prompt, output)), return_inverse=True)
            self._ids_N = distinct.astype(np.int64)
            self._counts_N = np.bincount(inverse[len(prompt) :], minlength=len(distinct))
            self._index = {token: index for index, token in enumerate(self._ids_N.tolist())}
        return self._index


class PenaltiesTable(Table[Penalties]):
    def __init__(self, device: torch.device, *, vocab_size: int, **sizes: Any) -> None:
        super().__init__(device, vocab_size=vocab_size, **sizes)
        # Repetition, presence, frequency.
        self._penalties_3P = torch.empty(3, 0, device=device)
        self._prompt_mask_PW = torch.empty(0, self.num_words, dtype=torch.int32, device=device)
        # Half a MiB per place for a vocabulary of 128,256.
        self._output_counts_PV = torch.empty(0, vocab_size, dtype=torch.int32, device=device)

    def stage_rows(self, new: Sequence[tuple[int, Penalties]], slot: StepSlot) -> Sequence[Part]:
        penalties = [(each.repetition, each.presence, each.frequency) for _, each in new]
        masks_MW = np.stack([self.bits(each.prompt_token_ids) for _, each in new])
        said = [np.unique(each.output_token_ids, return_counts=True) for _, each in new]
        places_MU = [
            int(self.place_R[row]) * self.vocab_size + tokens.astype(np.int64)
            for (row, _), (tokens, _) in zip(new, said, strict=True)
        ]
        counts_MU = [counts.astype(np.int32) for _, counts in said]
        return (
            slot.add(np.array(penalties, np.float32).T),
            slot.add(masks_MW),
            slot.add(np.concatenate(places_MU)),
            slot.add(np.concatenate(counts_MU)),
        )

    def write(self, staged: Staged) -> None:
        places, (penalties, masks, said_places, said_counts) = staged
        self._penalties_3P = grown(self._penalties_3P, 3, self.num_places)
        self._prompt_mask_PW = grown(self._prompt_mask_PW, self.num_places, self.num_words)
        self._output_counts_PV = grown(self._output_counts_PV, self.num_places, self.vocab_size)
        self._penalties_3P.index_copy_(1, places.tensor, penalties.tensor)
        self._prompt_mask_PW.index_copy_(0, places.tensor, masks.tensor)
        self._output_counts_PV.index_fill_(0, places.tensor, 0)
        self._output_counts_PV.view(-1).scatter_(0, said_places.tensor, said_counts.tensor)

    def stage(self, at: Positions, slot: StepSlot) -> Sequence[Part]:
        """Also stages the drafts before each position, which count as output."""
        places = super().stage(at, slot)
        return [*places, slot.add(at.drafts_AD)] if places and at.drafts_AD is not None else places

    def apply(self, logits_AV: torch.Tensor, positions_A: torch.Tensor, staged: Sequence[Part]) -> None:
        places, *drafts = staged
        repetition_P, presence_P, frequency_P = self._penalties_3P
        self.kernels.apply_penalties(
            logits_AV,
            places.tensor,
            self._prompt_mask_PW,
            self._output_counts_PV,
            repetition_R=repetition_P,
            presence_R=presence_P,
            frequency_R=frequency_P,
            drafts_LD=drafts[0].tensor if drafts else None,
        )

    def stage_counts(self, rows_N: np.ndarray, slot: StepSlot) -> Part | None:
        places_N = self.place_R[rows_N]
        return slot.add(places_N) if (places_N >= 0).any() else None

    def count(self, places_N: Part, tokens_ND1: torch.Tensor, counts_N: torch.Tensor) -> None:
        self.kernels.count_output(self._output_counts_PV, places_N.tensor, tokens_ND1, counts_N)
