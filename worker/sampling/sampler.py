"""Chooses the next token of every row that samples, on the CPU."""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.native.library import NativeKernels
from kernels.sampling import draw_rows, greedy
from protos import inference_pb2
from worker.sampling.logprobs import token_logprobs
from worker.sampling.state import NO_LOGPROBS, SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """logits_LV: float32, contiguous; changed in place where rows have penalties."""

    logits_LV: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """token_ids_L: int64, the likeliest. largest_L: float32, their logits."""

    token_ids_L: torch.Tensor
    largest_L: torch.Tensor


Scores = Logits | Greedy


_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Ten rounds over N counters at once.

    counter_4N: uint32 [4, N]. key_2N: uint32 [2, N]. Returns uint32 [4, N].
    """
    # 64-bit lanes hold the 32x32-bit products; wrapping is by masks, so that no overflow ever happens.
    c0, c1, c2, c3 = counter_4N.astype(np.uint64)
    k0, k1 = key_2N.astype(np.uint64)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)


def uniforms(seeds_N: np.ndarray, choices_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, choice, output position).

    seeds_N: uint64 [N]. choices_N, positions_N: integers below 2**32, [N]. Returns float64 [N], multiples of 2**-53.

    The seed is the key and (position, choice, 0, 0) the counter; the first two words of the output give 27 and 26 bits,
    as NumPy's Generator.random takes them from a 64-bit word.
    """
    seeds_N = seeds_N.astype(np.uint64)
    zeros_N = np.zeros_like(seeds_N)
    key_2N = np.stack((seeds_N & _LOW, seeds_N >> _HALF))
    counter_4N = np.stack((positions_N.astype(np.uint64), choices_N.astype(np.uint64), zeros_N, zeros_N))
    words_4N = philox4x32(counter_4N, key_2N).astype(np.float64)
    high_N, low_N = np.floor(words_4N[0] / 32), np.floor(words_4N[1] / 64)
    return (high_N * 2.0**26 + low_N) * 2.0**-53


@dataclass(slots=True, kw_only=True)
class Sampled:
    """One entry a row. token_ids_N: int64; 0 where failed_N, the rows whose logits were not finite. logprobs: by index
    into N, for rows that asked and did not fail."""

    token_ids_N: np.ndarray
    failed_N: np.ndarray
    logprobs: dict[int, inference_pb2.TokenLogprobs]


def sample(
    scores: Scores,
    scored_N: np.ndarray,
    state: SamplingState,
    rows_N: np.ndarray,
    positions_N: np.ndarray,
    kernels: NativeKernels | None,
) -> Sampled:
    """One token for each row.

    scored_N: where among `scores` each row's are; without logits there, all rows must be merely greedy. positions_N:
    output index of each token. kernels: what draws, if not PyTorch's path. A row's token is a function of its own
    logits, parameters, tokens and position alone.
    """
    if isinstance(scores, Greedy):
        failed_N = ~np.isfinite(scores.largest_L.numpy()[scored_N])
        token_ids_N = np.where(failed_N, 0, scores.token_ids_L.numpy()[scored_N])
        return Sampled(token_ids_N=token_ids_N, failed_N=failed_N, logprobs={})
    return _sample_logits(scores, scored_N, state, rows_N, positions_N, kernels)


def _sample_logits(
    scores: Logits,
    scored_N: np.ndarray,
    state: SamplingState,
    rows_N: np.ndarray,
    positions_N: np.ndarray,
    kernels: NativeKernels | None,
) -> Sampled:
    token_ids_N = np.zeros(len(rows_N), np.int64)
    failed_N = np.zeros(len(rows_N), np.bool_)
    asked_N = state.logprobs_R[rows_N] != NO_LOGPROBS
    draws_N = state.temperature_R[rows_N] > 0
    adjusts_N = state.adjusts_R[rows_N]
    # The model's own logits, of rows that asked for logprobs and whose logits are adjusted.
    own: dict[int, np.ndarray] = {}
    for i in np.flatnonzero(~draws_N | adjusts_N).tolist():
        row_1V = scores.logits_LV[scored_N[i], None]
        likeliest_1, largest_1 = greedy(row_1V)
        failed_N[i] = not np.isfinite(largest_1[0])
        adjustments = state.adjustments[rows_N[i]]
        if adjustments is not None and not failed_N[i]:
            if asked_N[i]:
                own[i] = row_1V[0].copy()
            adjustments.apply(row_1V[0])
            likeliest_1, _ = greedy(row_1V)
        token_ids_N[i] = 0 if failed_N[i] else likeliest_1[0]
    drawn = np.flatnonzero(draws_N & ~failed_N)
    tokens = _draw(scores, scored_N[drawn], state, rows_N[drawn], positions_N[drawn], kernels)
    failed_N[drawn] = tokens < 0
    token_ids_N[drawn] = np.maximum(tokens, 0)
    return Sampled(
        token_ids_N=token_ids_N,
        failed_N=failed_N,
        logprobs={
            i: token_logprobs(
                own.get(i, scores.logits_LV[scored_N[i]]), int(token_ids_N[i]), int(state.logprobs_R[rows_N[i]])
            )
            for i in np.flatnonzero(asked_N & ~failed_N).tolist()
        },
    )


def _draw(
    scores: Logits,
    scored_N: np.ndarray,
    state: SamplingState,
    rows_N: np.ndarray,
    positions_N: np.ndarray,
    kernels: NativeKernels | None,
) -> np.ndarray:
    return draw_rows(
        scores.logits_LV,
        scored_N,
        temperature_N=state.temperature_R[rows_N],
        uniform_N=uniforms(state.seed_R[rows_N], state.choice_R[rows_N], positions_N),
        top_k_N=state.top_k_R[rows_N],
        top_p_N=state.top_p_R[rows_N],
        min_p_N=state.min_p_R[rows_N],
        kernels=kernels,
    )
