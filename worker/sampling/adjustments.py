"""Changes a row's logits before temperature: logit bias, then penalties, then min_tokens (vLLM's order)."""

from dataclasses import dataclass

import numpy as np

from kernels.sampling import apply_logit_bias, apply_penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """What changes a row's logits before temperature, in this order: logit bias, penalties, min_tokens."""

    bias_token_ids: np.ndarray  # int32, distinct
    bias: np.ndarray  # float32
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    # That the row came with; counted if there are penalties.
    prompt_token_ids: np.ndarray  # int32
    output_token_ids: np.ndarray  # int32
    # Below so many output tokens, banned tokens are not chosen.
    min_tokens: int = 0
    banned_token_ids: np.ndarray  # int32


class LogitAdjustments:
    """What changes one row's logits before temperature: logit_bias, then penalties, then min_tokens (vLLM's order)."""

    def __init__(self, adjustments: Adjustments) -> None:
        self._given = adjustments
        self._penalised = adjustments.repetition != 1.0 or adjustments.presence != 0.0 or adjustments.frequency != 0.0
        self._num_output_tokens = len(adjustments.output_token_ids)
        # Distinct tokens in order of first sight, and how often each occurs in the output; both grow by doubling.
        self._ids_N = np.empty(0, np.int64)
        self._counts_N = np.empty(0, np.int64)
        # None: not counted yet. Where a GPU samples, its own counts are all there is.
        self._index: dict[int, int] | None = None

    def apply(self, logits_V: np.ndarray) -> None:
        """Changes the row's float32 logits in place."""
        given = self._given
        if len(given.bias):
            apply_logit_bias(logits_V, given.bias_token_ids, given.bias)
        if self._penalised:
            num_distinct = len(self._counted())
            apply_penalties(
                logits_V,
                self._ids_N[:num_distinct],
                self._counts_N[:num_distinct],
                repetition=given.repetition,
                presence=given.presence,
                frequency=given.frequency,
            )
        if self._num_output_tokens < given.min_tokens:
            logits_V[given.banned_token_ids] = -np.inf

    def append(self, token_id: int) -> None:
        self._num_output_tokens += 1
        if not self._penalised:
            return
        counted = self._counted()
        index = counted.setdefault(token_id, len(counted))
        if index == len(self._ids_N):
            self._ids_N = np.resize(self._ids_N, max(64, 2 * index))
            self._counts_N = np.concatenate((self._counts_N, np.zeros(len(self._ids_N) - index, np.int64)))
        self._ids_N[index] = token_id
        self._counts_N[index] += 1

    def _counted(self) -> dict[int, int]:
        """Where in the counts each token is."""
        if self._index is None:
            prompt, output = self._given.prompt_token_ids, self._given.output_token_ids
            distinct, inverse = np.unique(np.concatenate((prompt, output)), return_inverse=True)
            self._ids_N = distinct.astype(np.int64)
            self._counts_N = np.bincount(inverse[len(prompt) :], minlength=len(distinct))
            self._index = {token: index for index, token in enumerate(self._ids_N.tolist())}
        return self._index


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How a row that is new in this step samples. Resolved and checked."""

    row: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint64
    choice: int = 0
    # So many most likely tokens with logprobs beside the chosen one's; None: no logprobs.
    num_logprobs: int | None = None
    adjustments: Adjustments | None = None
