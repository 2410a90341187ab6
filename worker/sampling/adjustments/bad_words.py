"""bad_words: token sequences that do not appear in the output.

A sequence's last token is banned where the output so far ends with the tokens before it. As in vLLM, the prompt does
not count: a sequence that begins in it may be completed.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from configs.sampling import MAX_BAD_WORD_TOKENS
from worker.device.staging import Part, StepSlot
from worker.errors import PlanError
from worker.sampling.feature import Adjustment, NewRow, Positions, Staged, Table, grown, padded

# Output tokens that a row's table keeps. A sequence has at most as many, and a power of 2 makes the kernel's modulo
# cheap.
_HISTORY = MAX_BAD_WORD_TOKENS
assert _HISTORY & (_HISTORY - 1) == 0


class BadWords(Adjustment):
    fields = ("bad_word_token_ids",)
    bans = "bad_words"

    def __init__(self, sequences: Sequence[tuple[int, ...]], output: np.ndarray) -> None:
        """sequences: at least one, none is empty. output: the output tokens that the row comes with."""
        self.sequences = sequences
        # For a GPU.
        self.num_output_tokens, self.last_output = len(output), output[-_HISTORY:].astype(np.int32)
        self._always = np.array([each[0] for each in sequences if len(each) == 1], np.int64)
        # Longer sequences by the token before the last.
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for each in sequences:
            if len(each) > 1:
                self._after.setdefault(each[-2], []).append(each)
        longest = max(map(len, sequences)) - 1
        # The end of the output, as far as a sequence looks back. It stays as it is where a GPU samples.
        self._end: list[int] = output[max(len(output) - longest, 0) :].tolist()
        self._longest = longest

    @classmethod
    def add(cls, new: NewRow) -> Self | None:
        sequences = [tuple(each.ids) for each in new.sampling.bad_word_token_ids]
        for each in sequences:
            if not each or max(each) >= new.vocab_size or len(each) > _HISTORY:
                raise PlanError(
                    f"new_rows: sampling.bad_word_token_ids has a sequence of {len(each)} tokens up to "
                    f"{max(each, default=0)}; 1 to {_HISTORY} tokens below vocab_size, {new.vocab_size}, are valid"
                )
        return cls(sequences, new.output)

    def apply(self, logits_V: np.ndarray) -> None:
        logits_V[self._always] = -np.inf
        if self._end:
            for each in self._after.get(self._end[-1], ()):
                prefix = len(each) - 1
                if len(self._end) >= prefix and tuple(self._end[-prefix:]) == each[:-1]:
                    logits_V[each[-1]] = -np.inf

    def append(self, token_id: int) -> None:
        self._end.append(token_id)
        if len(self._end) > self._longest:
            del self._end[0]


class BadWordsTable(Table[BadWords]):
    """The sequences of each place, one after the other, and its last output tokens, which the device counts itself."""

    def __init__(self, device: torch.device, **sizes: Any) -> None:
        super().__init__(device, **sizes)
        self._token_ids_PT = torch.empty(0, 0, dtype=torch.int32, device=device)
        # The end of each sequence among a place's tokens; 0 where there are fewer than K.
        self._ends_PK = torch.empty(0, 0, dtype=torch.int32, device=device)
        # The output token at position p is at p % _HISTORY.
        self._said_PH = torch.empty(0, _HISTORY, dtype=torch.int32, device=device)
        self._lengths_P1 = torch.empty(0, 1, dtype=torch.int32, device=device)

    def stage_rows(self, new: Sequence[tuple[int, BadWords]], slot: StepSlot) -> Sequence[Part]:
        token_ids = [np.concatenate(each.sequences) for _, each in new]
        ends = [np.cumsum([len(sequence) for sequence in each.sequences]) for _, each in new]
        said_MH = np.zeros((len(new), _HISTORY), np.int32)
        for line, (_, each) in zip(said_MH, new, strict=True):
            first = each.num_output_tokens - len(each.last_output)
            line[np.arange(first, each.num_output_tokens) % _HISTORY] = each.last_output
        return (
            slot.add(padded(token_ids, self._token_ids_PT, np.int32, -1)),
            slot.add(padded(ends, self._ends_PK, np.int32, 0)),
            slot.add(said_MH),
            slot.add(np.array([[each.num_output_tokens] for _, each in new], np.int32)),
        )

    def write(self, staged: Staged) -> None:
        places, (token_ids, ends, said, lengths) = staged
        num_places = self.num_places
        self._token_ids_PT = grown(self._token_ids_PT, num_places, token_ids.array.shape[1], fill=-1)
        self._ends_PK = grown(self._ends_PK, num_places, ends.array.shape[1])
        self._said_PH = grown(self._said_PH, num_places, _HISTORY)
        self._lengths_P1 = grown(self._lengths_P1, num_places, 1)
        for table, part in (
            (self._token_ids_PT, token_ids),
            (self._ends_PK, ends),
            (self._said_PH, said),
            (self._lengths_P1, lengths),
        ):
            table.index_copy_(0, places.tensor, part.tensor)

    def stage(self, at: Positions, slot: StepSlot) -> Sequence[Part]:
        """Also stages the drafts before each position, which count as output."""
        places = super().stage(at, slot)
        return [*places, slot.add(at.drafts_AD)] if places and at.drafts_AD is not None else places

    def apply(self, logits_AV: torch.Tensor, positions_A: torch.Tensor, staged: Sequence[Part]) -> None:
        places, *drafts = staged
        self.kernels.ban_sequences(
            logits_AV,
            places.tensor,
            positions_A,
            self._token_ids_PT,
            self._ends_PK,
            self._said_PH,
            drafts_LD=drafts[0].tensor if drafts else None,
        )

    def stage_counts(self, rows_N: np.ndarray, slot: StepSlot) -> Part | None:
        places_N = self.place_R[rows_N]
        return slot.add(places_N) if (places_N >= 0).any() else None

    def count(self, places_N: Part, tokens_ND1: torch.Tensor, counts_N: torch.Tensor) -> None:
        self.kernels.remember_output(self._said_PH, self._lengths_P1.view(-1), places_N.tensor, tokens_ND1, counts_N)
