"""logit_bias: adds numbers to the logits of some tokens."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from kernels.sampling import apply_logit_bias
from worker.device.staging import Part, StepSlot
from worker.errors import PlanError
from worker.sampling.feature import Adjustment, NewRow, Staged, Table, grown, padded


class Bias(Adjustment):
    fields = ("logit_bias",)

    def __init__(self, token_ids: np.ndarray, bias: np.ndarray) -> None:
        """token_ids: int32, distinct. bias: float32."""
        self.token_ids, self.bias = token_ids, bias

    @classmethod
    def add(cls, new: NewRow) -> Self | None:
        given = new.sampling.logit_bias
        if outside := [token for token in given if token >= new.vocab_size]:
            raise PlanError(f"new_rows: sampling.logit_bias names token {outside[0]}; vocab_size is {new.vocab_size}")
        if not given:
            return None
        # Sorted: the order of a map differs between runs.
        bias = sorted(given.items())
        return cls(np.array([token for token, _ in bias], np.int32), np.array([value for _, value in bias], np.float32))

    def apply(self, logits_V: np.ndarray) -> None:
        apply_logit_bias(logits_V, self.token_ids, self.bias)


class BiasTable(Table[Bias]):
    def __init__(self, device: torch.device, **sizes: Any) -> None:
        super().__init__(device, **sizes)
        self._token_ids_PK = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._bias_PK = torch.empty(0, 0, device=device)

    def stage_rows(self, new: Sequence[tuple[int, Bias]], slot: StepSlot) -> Sequence[Part]:
        token_ids_MK = padded([each.token_ids for _, each in new], self._token_ids_PK, np.int32, -1)
        bias_MK = padded([each.bias for _, each in new], self._token_ids_PK, np.float32, 0)
        return slot.add(token_ids_MK), slot.add(bias_MK)

    def write(self, staged: Staged) -> None:
        places, (token_ids, bias) = staged
        size = self.num_places, token_ids.array.shape[1]
        self._token_ids_PK = grown(self._token_ids_PK, *size, fill=-1)
        self._bias_PK = grown(self._bias_PK, *size)
        self._token_ids_PK.index_copy_(0, places.tensor, token_ids.tensor)
        self._bias_PK.index_copy_(0, places.tensor, bias.tensor)

    def apply(self, logits_AV: torch.Tensor, positions_A: torch.Tensor, staged: Sequence[Part]) -> None:
        (places,) = staged
        self.kernels.add_logit_bias(logits_AV, places.tensor, self._token_ids_PK, self._bias_PK)
