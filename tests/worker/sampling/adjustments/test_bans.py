"""allowed_token_ids and bad_words on a CPU and on a GPU, against their definitions."""

from typing import Any

import numpy as np
import pytest

from kernels.sampling.reference import banned_reference
from protos.inference_pb2 import SamplingParams, TokenIds
from tests.support.gpu.gpu_engine import EngineRun, outputs_alone
from tests.support.kernels.kernel_paths import native
from worker.errors import PlanError
from worker.sampling.sampler import Logits, Sampled, sample
from worker.sampling.state import SamplingState

VOCAB, EOS = 300, 2
PAIRS = [[first, second] for first in range(20, 60) for second in (50, 51)]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def bad_words(*sequences: list[int]) -> list[TokenIds]:
    return [TokenIds(ids=each) for each in sequences]


def state_of(*rows: dict[str, Any], prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> SamplingState:
    state = SamplingState(num_rows=max(len(rows), 1), vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    for row, params in enumerate(rows):
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        state.set(row, sampling, 0, np.array(prompt, np.int64), np.array(output, np.int64))
    return state


def sampled(state: SamplingState, logits_LV: np.ndarray, positions: list[int], kernels: Any = None) -> Sampled:
    rows = np.arange(len(logits_LV))
    return sample(Logits(logits_LV=logits_LV.copy()), rows, state, rows, np.array(positions), kernels)


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=(count, VOCAB)).astype(np.float32)


def test_only_allowed_tokens_are_left_and_their_logits_are_as_they_were() -> None:
    state, logits_V = state_of({"allowed_token_ids": [9, 4, 9, 299]}), noise(1)[0]
    adjusted_V = logits_V.copy()
    state.adjust(0, adjusted_V)
    assert np.flatnonzero(np.isfinite(adjusted_V)).tolist() == [4, 9, 299]
    assert np.array_equal(adjusted_V[[4, 9, 299]], logits_V[[4, 9, 299]])


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 50}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 2, "top_p": 0.9}, {"top_n_sigma": 3.0}]
)
@pytest.mark.parametrize("drawn_by", ["native", "numpy"])
def test_no_filter_draws_a_token_that_is_not_allowed(filters: dict[str, Any], drawn_by: str) -> None:
    """top_k may ask for more tokens than there are."""
    allowed = [3, 17, 250]
    params = {"temperature": 5.0, "allowed_token_ids": allowed, **filters}
    state = state_of(*({**params, "seed": seed} for seed in range(200)))
    logits_LV = np.tile(noise(1), (200, 1))
    logits_LV[:, [3, 17, 250]] = [-1.0, -0.5, -1.2]
    drawn = sampled(state, logits_LV, [0] * 200, native() if drawn_by == "native" else None)
    assert not drawn.failed_N.any()
    assert 1 < len(set(drawn.token_ids_N.tolist())) <= 3
    assert set(drawn.token_ids_N.tolist()) <= set(allowed)


def test_bad_words_see_the_output_and_not_the_prompt() -> None:
    sequences = [[7], [4, 5], [5, 4, 6], [9, 9, 9, 9]]
    output: list[int] = []
    state = state_of({"bad_word_token_ids": bad_words(*sequences)}, prompt=(4,))
    random = np.random.default_rng(1)
    num_banned = 0
    for _ in range(300):
        adjusted_V = np.zeros(VOCAB, np.float32)
        state.adjust(0, adjusted_V)
        banned = banned_reference(sequences, output)
        assert set(np.flatnonzero(~np.isfinite(adjusted_V)).tolist()) == banned
        num_banned += len(banned)
        # A sequence that is computed again from its tokens goes on as if it had never left.
        again_V = np.zeros(VOCAB, np.float32)
        state_of({"bad_word_token_ids": bad_words(*sequences)}, prompt=(4,), output=tuple(output)).adjust(0, again_V)
        assert np.array_equal(again_V, adjusted_V)
        output.append(int(random.choice([4, 5, 9])))
        state.append(0, output[-1])
    assert num_banned > 400


def test_a_biased_or_penalised_token_stays_banned() -> None:
    params: dict[str, Any] = {
        "logit_bias": {8: 100.0, 9: 100.0},
        "repetition_penalty": 0.01,
        "bad_word_token_ids": bad_words([8]),
        "allowed_token_ids": [8, 9, EOS],
        "min_tokens": 2,
    }
    state = state_of(params, prompt=(8,))
    adjusted_V = noise(1)[0]
    state.adjust(0, adjusted_V)
    # min_tokens bans EOS, though it is allowed.
    assert np.flatnonzero(np.isfinite(adjusted_V)).tolist() == [9]
    state.append(0, 9)
    state.append(0, 9)
    adjusted_V = noise(1)[0]
    state.adjust(0, adjusted_V)
    assert np.flatnonzero(np.isfinite(adjusted_V)).tolist() == [EOS, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_position_without_a_token_to_choose_fails_alone(temperature: float) -> None:
    """Routers refuse such requests."""
    nothing = {"temperature": temperature, "seed": 1, "allowed_token_ids": [8], "bad_word_token_ids": bad_words([8])}
    drawn = sampled(state_of(nothing, {}), noise(2), [0, 0])
    assert drawn.failed_N.tolist() == [True, False]


def test_logprobs_are_those_of_the_model() -> None:
    logits_LV = noise(1)
    plain = sampled(state_of({"logprobs": 3}), logits_LV, [0]).logprobs[0]
    banned = sampled(state_of({"logprobs": 3, "allowed_token_ids": [plain.top[1].token_id]}), logits_LV, [0]).logprobs[
        0
    ]
    assert banned.chosen == plain.top[1]
    assert banned.top == plain.top


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids names token 300"),
        ({"bad_word_token_ids": bad_words([1, VOCAB])}, "up to 300"),
        ({"bad_word_token_ids": bad_words([1], [])}, "a sequence of 0 tokens"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        state_of(params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, allowed_token_ids=[20, 33, 70]),
        SamplingParams(temperature=2.0, seed=4, allowed_token_ids=range(30, 40), top_k=20),
        SamplingParams(temperature=2.0, seed=4, bad_word_token_ids=bad_words([40], *PAIRS)),
    ],
)
def test_a_row_that_comes_back_goes_on(params: SamplingParams) -> None:
    """In a GPU engine it comes back in another row with its output so far; its tokens equal a CPU's."""
    expected = outputs_alone(PROMPT, params, 9)
    plain = SamplingParams(temperature=params.temperature, seed=4)
    if params.allowed_token_ids:
        assert set(expected) <= set(params.allowed_token_ids)
    run = EngineRun()
    assert run.run(0, PROMPT, params, 3) == expected[:3]
    run.free(0)
    run.add(0, PROMPT, plain)
    run.add(3, PROMPT, params, output=expected[:3])
    run.step({0: 11, 3: 14})
    # With drafts, each position has its own logits.
    run.step({0: 1, 3: 1}, drafts={0: [], 3: expected[4:7]})
    run.step({0: 1, 3: 1})
    assert run.rows[3].output == expected[: len(run.rows[3].output)]
    assert len(run.rows[3].output) == 9
