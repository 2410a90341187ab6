"""How each row samples: a new row's parameters checked and resolved, then columns of all rows."""

import numpy as np

from configs.sampling import BY_NAME, MAX_LOGPROBS, out_of_range
from protos import inference_pb2
from worker.errors import PlanError
from worker.sampling.adjustments import Adjustments, LogitAdjustments, RowSampling

# Below this a softmax is an argmax in float32; such rows are greedy (vLLM draws the same line).
MIN_TEMPERATURE = 1e-5
# Errors show it as the least number above 0, where 0 itself is out of range.
_LEAST = 1e-9


def resolve_sampling(
    row: int,
    sampling: inference_pb2.SamplingParams,
    choice: int,
    prompt: np.ndarray,
    output: np.ndarray,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> RowSampling:
    """prompt and output are the tokens that the row comes with.

    Raises PlanError, naming the field, for a value that is missing or out of range.
    """
    if not sampling.HasField("seed") and sampling.temperature >= MIN_TEMPERATURE:
        raise PlanError(f"new_rows: row {row} samples at temperature {sampling.temperature:g} without a seed")
    if (wrong := out_of_range(sampling)) is not None:
        parameter, value = wrong
        low = _LEAST if parameter.low_is_open else parameter.low
        raise PlanError(
            f"new_rows: row {row} has sampling.{parameter.name}={value:g}; {low:g} to {parameter.high:g} is valid"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(sampling, name)) > MAX_LOGPROBS:
            raise PlanError(f"new_rows: row {row} has sampling.{name}={count}; 0 to {MAX_LOGPROBS} is valid")
    return RowSampling(
        row=row,
        temperature=0.0 if sampling.temperature < MIN_TEMPERATURE else sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=BY_NAME["top_p"].value_in(sampling),
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=choice,
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        adjustments=_adjustments(sampling, prompt, output, vocab_size, eos_token_ids),
    )


def _adjustments(
    sampling: inference_pb2.SamplingParams,
    prompt: np.ndarray,
    output: np.ndarray,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Adjustments | None:
    """None if the parameters leave logits as they are."""
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        outside = [token for token in ids if token >= vocab_size]
        if outside:
            raise PlanError(f"new_rows: sampling.{name} names token {outside[0]}; vocab_size is {vocab_size}")
    banned = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})
    waits = len(output) < sampling.min_tokens and bool(banned)
    penalised = _repetition(sampling) != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    if not (waits or penalised or sampling.logit_bias):
        return None
    # Sorted: the order of a map differs between runs.
    bias = sorted(sampling.logit_bias.items())
    return Adjustments(
        bias_token_ids=np.array([token for token, _ in bias], np.int32),
        bias=np.array([value for _, value in bias], np.float32),
        repetition=_repetition(sampling),
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        prompt_token_ids=prompt.astype(np.int32),
        output_token_ids=output.astype(np.int32),
        min_tokens=sampling.min_tokens,
        banned_token_ids=np.array(banned, np.int32),
    )


def _repetition(sampling: inference_pb2.SamplingParams) -> float:
    return BY_NAME["repetition_penalty"].value_in(sampling)


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
