"""Chooses the next token of every row that samples.

Shape suffixes: N sampling rows of the step, D those of them that draw, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling import draw, greedy
from protos import inference_pb2
from worker.logprobs import token_logprobs
from worker.philox import uniforms
from worker.sampling_state import NO_LOGPROBS, SamplingState


@dataclass(slots=True, kw_only=True)
class Sampled:
    """token_ids_N: int64; 0 where failed_N, the rows whose logits were not finite. logprobs: by index into N, for rows
    that asked."""

    token_ids_N: np.ndarray
    failed_N: np.ndarray
    logprobs: dict[int, inference_pb2.TokenLogprobs]


def sample(logits_NV: torch.Tensor, state: SamplingState, rows_N: np.ndarray, positions_N: np.ndarray) -> Sampled:
    """One token for each row.

    logits_NV: float32, contiguous, on the CPU; changed in place where rows have penalties. positions_N: output index of
    each token. A row's token is a function of its own logits, parameters, tokens and position alone.
    """
    adjusted = [i for i, row in enumerate(rows_N.tolist()) if state.adjustments[row] is not None]
    asked_N = np.flatnonzero(state.logprobs_R[rows_N] != NO_LOGPROBS)
    draws_D = np.flatnonzero(state.temperature_R[rows_N] > 0)
    token_ids_N, largest_N = greedy(logits_NV)
    failed_N = ~np.isfinite(largest_N)
    if failed_N.any():
        # Any finite numbers keep the rest of this simple; nobody reads what they give.
        logits_NV[torch.from_numpy(failed_N)] = 0.0
    # A copy, taken before penalties change the logits.
    asked_logits = logits_NV[torch.from_numpy(asked_N)] if len(asked_N) else None
    if adjusted:
        for i in adjusted:
            adjustments = state.adjustments[rows_N[i]]
            assert adjustments is not None
            adjustments.apply(logits_NV.numpy()[i])
        token_ids_N[adjusted] = greedy(logits_NV[adjusted])[0]
    if len(draws_D):
        token_ids_N[draws_D] = _draw(logits_NV, state, draws_D, rows_N[draws_D], positions_N[draws_D])
    token_ids_N[failed_N] = 0
    logprobs = {}
    if asked_logits is not None:
        entries = token_logprobs(asked_logits, token_ids_N[asked_N], state.logprobs_R[rows_N[asked_N]])
        logprobs = dict(zip(asked_N.tolist(), entries, strict=True))
    return Sampled(token_ids_N=token_ids_N, failed_N=failed_N, logprobs=logprobs)


def _draw(
    logits_NV: torch.Tensor, state: SamplingState, draws_D: np.ndarray, rows_D: np.ndarray, positions_D: np.ndarray
) -> np.ndarray:
    drawn_DV = logits_NV if len(draws_D) == len(logits_NV) else logits_NV[torch.from_numpy(draws_D)]
    # Largest first to 0: a small temperature would carry large logits to infinity.
    scaled_DV = drawn_DV - drawn_DV.amax(-1, keepdim=True)
    scaled_DV /= torch.from_numpy(state.temperature_R[rows_D]).unsqueeze(-1)
    return draw(
        torch.softmax(scaled_DV, -1),
        uniforms(state.seed_R[rows_D], state.choice_R[rows_D], positions_D),
        state.top_k_R[rows_D],
        state.top_p_R[rows_D],
        state.min_p_R[rows_D],
    )
