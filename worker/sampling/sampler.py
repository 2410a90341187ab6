"""Chooses the next token of every row that samples, on the CPU."""

from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.native.library import NativeKernels
from kernels.sampling import greedy
from protos import inference_pb2
from worker.sampling.logprobs import token_logprobs
from worker.sampling.state import NO_LOGPROBS, SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Scores as logits. logits_LV: float32, contiguous; changed in place for rows with adjustments."""

    logits_LV: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Scores as the likeliest tokens. token_ids_L: int64. largest_L: float32, their logits.

    For rows with a constraint, the likeliest of those that their masks leave: the logit is -inf if they leave none."""

    token_ids_L: torch.Tensor
    largest_L: torch.Tensor


Scores = Logits | Greedy


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The sampled tokens, one entry per row. token_ids_N: int64; 0 where failed_N is set: the row's logits were not
    finite, or nothing was left of them. logprobs: by index into N, for rows that asked and did not fail. why: by index
    into N, for rows that failed although their logits were finite."""

    token_ids_N: np.ndarray
    failed_N: np.ndarray
    logprobs: dict[int, inference_pb2.TokenLogprobs]
    why: dict[int, str] = field(default_factory=dict)


def sample(
    scores: Scores,
    scored_N: np.ndarray,
    state: SamplingState,
    rows_N: np.ndarray,
    positions_N: np.ndarray,
    kernels: NativeKernels | None,
    uniform_N: np.ndarray | None = None,
) -> Sampled:
    """Samples one token for each row. It depends only on the row's own logits, parameters, tokens and position.

    scored_N: each row's index into `scores`; with `Greedy` scores all rows must be merely greedy, with a constraint or
    without. positions_N: output index of each token. kernels: native kernels that draw; None: PyTorch draws.
    uniform_N: the random numbers of rows that draw, if they are known.
    """
    if isinstance(scores, Greedy):
        largest_N = scores.largest_L.numpy()[scored_N]
        failed_N = ~np.isfinite(largest_N)
        token_ids_N = np.where(failed_N, 0, scores.token_ids_L.numpy()[scored_N])
        why = {
            i: state.why_no_token(int(rows_N[i]), int(positions_N[i]))
            for i in np.flatnonzero(failed_N & state.adjusts_R[rows_N] & np.isneginf(largest_N)).tolist()
        }
        return Sampled(token_ids_N=token_ids_N, failed_N=failed_N, logprobs={}, why=why)
    return _sample_logits(scores, scored_N, state, rows_N, positions_N, kernels, uniform_N)


def _sample_logits(
    scores: Logits,
    scored_N: np.ndarray,
    state: SamplingState,
    rows_N: np.ndarray,
    positions_N: np.ndarray,
    kernels: NativeKernels | None,
    uniform_N: np.ndarray | None,
) -> Sampled:
    token_ids_N = np.zeros(len(rows_N), np.int64)
    failed_N = np.zeros(len(rows_N), np.bool_)
    asked_N = state.logprobs_R[rows_N] != NO_LOGPROBS
    draws_N = state.filters.temperature_R[rows_N] > 0
    adjusts_N = state.adjusts_R[rows_N]
    # Copies of the model's own logits for rows that asked for logprobs and whose logits are adjusted.
    own: dict[int, np.ndarray] = {}
    why: dict[int, str] = {}
    for i in np.flatnonzero(~draws_N | adjusts_N).tolist():
        row_1V = scores.logits_LV[scored_N[i], None]
        if draws_N[i] and not asked_N[i] and state.is_only_constrained(int(rows_N[i])):
            # Logits that are not finite stay so under a mask: the draw finds them.
            state.adjust(int(rows_N[i]), row_1V[0])
            continue
        likeliest_1, largest_1 = greedy(row_1V)
        failed_N[i] = not np.isfinite(largest_1[0])
        if adjusts_N[i] and not failed_N[i]:
            if asked_N[i]:
                own[i] = row_1V[0].copy()
            state.adjust(int(rows_N[i]), row_1V[0])
            if draws_N[i]:
                continue
            # Bans may leave no token at all.
            likeliest_1, largest_1 = greedy(row_1V)
            if not np.isfinite(largest_1[0]):
                failed_N[i] = True
                why[i] = state.why_no_token(int(rows_N[i]), int(positions_N[i]))
        token_ids_N[i] = 0 if failed_N[i] else likeliest_1[0]
    drawn = np.flatnonzero(draws_N & ~failed_N)
    rows_D = rows_N[drawn]
    uniform_D = state.filters.uniforms(rows_D, positions_N[drawn]) if uniform_N is None else uniform_N[drawn]
    tokens = state.filters.draw(scores.logits_LV, scored_N[drawn], rows_D, uniform_D, kernels)
    failed_N[drawn] = tokens < 0
    for i in drawn[(tokens < 0) & adjusts_N[drawn]].tolist():
        if (scores.logits_LV[scored_N[i]] < np.inf).all():
            why[i] = state.why_no_token(int(rows_N[i]), int(positions_N[i]))
    token_ids_N[drawn] = np.maximum(tokens, 0)
    return Sampled(
        token_ids_N=token_ids_N,
        failed_N=failed_N,
        logprobs={
            i: token_logprobs(
                own.get(i, scores.logits_LV[scored_N[i]]),
                int(token_ids_N[i]),
                int(state.logprobs_R[rows_N[i]]),
                state.listed.get(int(rows_N[i])),
            )
            for i in np.flatnonzero(asked_N & ~failed_N).tolist()
        },
        why=why,
    )
