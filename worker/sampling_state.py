"""How each row samples: columns for what every row has, an object for what few rows have.

Shape suffixes: R permanent rows, N distinct tokens, V vocabulary.
"""

import numpy as np

from kernels.sampling import apply_logit_bias, apply_penalties
from protos import inference_pb2
from worker.gpu.step_inputs import Adjustments, RowSampling
from worker.row_sampling import resolve_sampling

# `logprobs` of a row that asked for none.
NO_LOGPROBS = -1


class SamplingState:
    """Sampling parameters of all rows. Entries of a free row mean nothing."""

    def __init__(self, *, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.temperature_R = np.zeros(num_rows, np.float32)
        self.top_k_R = np.zeros(num_rows, np.int64)
        self.top_p_R = np.ones(num_rows, np.float64)
        self.min_p_R = np.zeros(num_rows, np.float32)
        self.seed_R = np.zeros(num_rows, np.uint64)
        self.choice_R = np.zeros(num_rows, np.uint32)
        self.logprobs_R = np.full(num_rows, NO_LOGPROBS, np.int64)
        self.prompt_logprobs_R = np.full(num_rows, NO_LOGPROBS, np.int64)
        self.adjustments: list[LogitAdjustments | None] = [None] * num_rows
        # Rows whose adjustments are not None.
        self.adjusts_R = np.zeros(num_rows, np.bool_)
        # Rows that are more than merely greedy, and rows that want prompt logprobs: in most steps one look says that
        # there are none.
        self._demanding_rows: set[int] = set()
        self._scoring_rows: set[int] = set()

    def set(
        self, row: int, sampling: inference_pb2.SamplingParams, choice: int, prompt: np.ndarray, output: np.ndarray
    ) -> RowSampling:
        """Takes a new row's parameters, and returns them resolved; prompt and output are the tokens it comes with.

        Raises PlanError, naming the field, for a value that is missing or out of range.
        """
        resolved = resolve_sampling(
            row, sampling, choice, prompt, output, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        )
        scores_prompt = sampling.HasField("prompt_logprobs")
        self.temperature_R[row] = resolved.temperature
        self.top_k_R[row] = resolved.top_k
        self.top_p_R[row] = resolved.top_p
        self.min_p_R[row] = resolved.min_p
        self.seed_R[row] = resolved.seed
        self.choice_R[row] = resolved.choice
        self.logprobs_R[row] = NO_LOGPROBS if resolved.num_logprobs is None else resolved.num_logprobs
        self.prompt_logprobs_R[row] = sampling.prompt_logprobs if scores_prompt else NO_LOGPROBS
        adjustments = None if resolved.adjustments is None else LogitAdjustments(resolved.adjustments)
        self.adjustments[row] = adjustments
        self.adjusts_R[row] = adjustments is not None
        if resolved.temperature > 0 or adjustments is not None or resolved.num_logprobs is not None:
            self._demanding_rows.add(row)
        if scores_prompt:
            self._scoring_rows.add(row)
        return resolved

    def needs_logits(self, rows_N: np.ndarray) -> bool:
        """Whether one of these rows is more than merely greedy."""
        return bool(self._demanding_rows) and not self._demanding_rows.isdisjoint(rows_N.tolist())

    @property
    def scores_prompts(self) -> bool:
        """Whether a row wants prompt logprobs."""
        return bool(self._scoring_rows)

    def clear(self, row: int) -> None:
        """Drops what holds memory, and what the row demanded."""
        self.adjustments[row] = None
        self.adjusts_R[row] = False
        self._demanding_rows.discard(row)
        self._scoring_rows.discard(row)

    def append(self, row: int, token_id: int) -> None:
        """Counts a token that the row sampled."""
        adjustments = self.adjustments[row]
        if adjustments is not None:
            adjustments.append(token_id)


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
