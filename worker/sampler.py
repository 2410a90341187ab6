"""Chooses the next token of every row that samples.

Shape suffixes: N sampling rows of the step, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np

from kernels.sampling import draw, greedy
from protos import inference_pb2
from worker.logprobs import token_logprobs
from worker.philox import uniforms
from worker.sampling_state import NO_LOGPROBS, SamplingState


@dataclass(slots=True, kw_only=True)
class Sampled:
    """One entry a row. token_ids_N: int64; 0 where failed_N, the rows whose logits were not finite. logprobs: by index
    into N, for rows that asked and did not fail."""

    token_ids_N: np.ndarray
    failed_N: np.ndarray
    logprobs: dict[int, inference_pb2.TokenLogprobs]


def sample(logits_NV: np.ndarray, state: SamplingState, rows_N: np.ndarray, positions_N: np.ndarray) -> Sampled:
    """One token for each row.

    logits_NV: float32; changed in place where rows have penalties. positions_N: output index of each token. A row's
    token is a function of its own logits, parameters, tokens and position alone.
    """
    token_ids_N, largest_N = greedy(logits_NV)
    failed_N = ~np.isfinite(largest_N)
    token_ids_N[failed_N] = 0
    asked_N = state.logprobs_R[rows_N] != NO_LOGPROBS
    draws_N = state.temperature_R[rows_N] > 0
    adjusts_N = np.array([state.adjustments[row] is not None for row in rows_N.tolist()])
    # Rows that are merely greedy, as all are in the cheapest batches, are done.
    busy_N = np.flatnonzero((asked_N | draws_N | adjusts_N) & ~failed_N)
    logprobs: dict[int, inference_pb2.TokenLogprobs] = {}
    if not len(busy_N):
        return Sampled(token_ids_N=token_ids_N, failed_N=failed_N, logprobs=logprobs)
    uniforms_N = uniforms(state.seed_R[rows_N], state.choice_R[rows_N], positions_N)
    for i in busy_N.tolist():
        row, logits_V = int(rows_N[i]), logits_NV[i]
        own_logits_V = logits_V.copy() if asked_N[i] and adjusts_N[i] else logits_V
        adjustments = state.adjustments[row]
        if adjustments is not None:
            adjustments.apply(logits_V)
            token_ids_N[i] = logits_V.argmax()
        if draws_N[i]:
            token_ids_N[i] = _draw(logits_V, state, row, uniforms_N[i])
        if asked_N[i]:
            logprobs[i] = token_logprobs(own_logits_V, int(token_ids_N[i]), int(state.logprobs_R[row]))
    return Sampled(token_ids_N=token_ids_N, failed_N=failed_N, logprobs=logprobs)


def _draw(logits_V: np.ndarray, state: SamplingState, row: int, uniform: float) -> int:
    return draw(
        logits_V,
        temperature=float(state.temperature_R[row]),
        uniform=float(uniform),
        top_k=int(state.top_k_R[row]),
        top_p=float(state.top_p_R[row]),
        min_p=float(state.min_p_R[row]),
    )
