"""How each row samples: columns for what every row has, an object for what few rows have.

Shape suffixes: R permanent rows, N distinct tokens, V vocabulary.
"""

import numpy as np

from kernels.sampling import apply_logit_bias, apply_penalties
from protos import inference_pb2
from worker.errors import PlanError

# Below this a softmax is an argmax in float32; such rows are greedy (vLLM draws the same line).
MIN_TEMPERATURE = 1e-5
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
    ) -> None:
        """Takes a new row's parameters; prompt and output are the tokens it comes with.

        Raises PlanError, naming the field, for a value that is missing or out of range.
        """
        if not sampling.HasField("seed") and sampling.temperature >= MIN_TEMPERATURE:
            raise PlanError(f"new_rows: row {row} samples at temperature {sampling.temperature:g} without a seed")
        # NaN fails every comparison.
        for name, value, low, high in (
            ("temperature", sampling.temperature, 0, 100),
            ("top_p", sampling.top_p if sampling.HasField("top_p") else 1.0, 1e-9, 1),
            ("min_p", sampling.min_p, 0, 1),
            ("repetition_penalty", _repetition(sampling), 1e-9, 10),
            ("presence_penalty", sampling.presence_penalty, -2, 2),
            ("frequency_penalty", sampling.frequency_penalty, -2, 2),
            ("logprobs", sampling.logprobs, 0, 20),
            ("prompt_logprobs", sampling.prompt_logprobs, 0, 20),
        ):
            if not low <= value <= high:
                raise PlanError(f"new_rows: row {row} has sampling.{name}={value:g}; {low:g} to {high:g} is valid")
        greedy = sampling.temperature < MIN_TEMPERATURE
        self.temperature_R[row] = 0.0 if greedy else sampling.temperature
        self.top_k_R[row] = max(0, sampling.top_k)
        self.top_p_R[row] = sampling.top_p if sampling.HasField("top_p") else 1.0
        self.min_p_R[row] = sampling.min_p
        self.seed_R[row] = sampling.seed
        self.choice_R[row] = choice
        self.logprobs_R[row] = sampling.logprobs if sampling.HasField("logprobs") else NO_LOGPROBS
        self.prompt_logprobs_R[row] = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else NO_LOGPROBS
        adjustments = LogitAdjustments.of(
            sampling, prompt, output, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        )
        self.adjustments[row] = adjustments
        self.adjusts_R[row] = adjustments is not None
        if not greedy or adjustments is not None or sampling.HasField("logprobs"):
            self._demanding_rows.add(row)
        if sampling.HasField("prompt_logprobs"):
            self._scoring_rows.add(row)

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

    def __init__(
        self, sampling: inference_pb2.SamplingParams, prompt: np.ndarray, output: np.ndarray, banned: list[int]
    ) -> None:
        self._repetition = _repetition(sampling)
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._penalised = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        # Sorted: the order of a map differs between runs.
        bias = sorted(sampling.logit_bias.items())
        self._bias_ids = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._min_tokens = sampling.min_tokens
        self._banned = np.array(banned, np.int64)
        self._num_output_tokens = len(output)
        # Distinct tokens in order of first sight, and how often each occurs in the output; both grow by doubling.
        self._ids_N = np.empty(0, np.int64)
        self._counts_N = np.empty(0, np.int64)
        self._index: dict[int, int] = {}
        if self._penalised:
            self._begin_counts(prompt, output)

    @classmethod
    def of(
        cls,
        sampling: inference_pb2.SamplingParams,
        prompt: np.ndarray,
        output: np.ndarray,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> "LogitAdjustments | None":
        """None if the parameters leave logits as they are. Raises PlanError for ids outside the vocabulary."""
        for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise PlanError(f"new_rows: sampling.{name} names token {outside[0]}; vocab_size is {vocab_size}")
        banned = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})
        waits = len(output) < sampling.min_tokens and bool(banned)
        penalised = _repetition(sampling) != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        if not (waits or penalised or sampling.logit_bias):
            return None
        return cls(sampling, prompt, output, banned)

    def apply(self, logits_V: np.ndarray) -> None:
        """Changes the row's float32 logits in place."""
        if len(self._bias_ids):
            apply_logit_bias(logits_V, self._bias_ids, self._bias)
        if self._penalised:
            num_distinct = len(self._index)
            apply_penalties(
                logits_V,
                self._ids_N[:num_distinct],
                self._counts_N[:num_distinct],
                repetition=self._repetition,
                presence=self._presence,
                frequency=self._frequency,
            )
        if self._num_output_tokens < self._min_tokens:
            logits_V[self._banned] = -np.inf

    def append(self, token_id: int) -> None:
        self._num_output_tokens += 1
        if not self._penalised:
            return
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids_N):
            self._ids_N = np.resize(self._ids_N, max(64, 2 * index))
            self._counts_N = np.concatenate((self._counts_N, np.zeros(len(self._ids_N) - index, np.int64)))
        self._ids_N[index] = token_id
        self._counts_N[index] += 1

    def _begin_counts(self, prompt: np.ndarray, output: np.ndarray) -> None:
        distinct, inverse = np.unique(np.concatenate((prompt, output)), return_inverse=True)
        self._ids_N = distinct.astype(np.int64)
        self._counts_N = np.bincount(inverse[len(prompt) :], minlength=len(distinct))
        self._index = {token: index for index, token in enumerate(self._ids_N.tolist())}


def _repetition(sampling: inference_pb2.SamplingParams) -> float:
    return sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
