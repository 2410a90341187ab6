"""The sampler: parameters combined in vLLM's order, with no row affecting another."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.native.library import NativeKernels
from kernels.sampling import greedy
from kernels.sampling.reference import draw_reference, penalties_reference
from protos.inference_pb2 import SamplingParams
from tests.support.kernels.kernel_paths import native
from worker.sampling.sampler import Greedy, Logits, Sampled, sample
from worker.sampling.state import SamplingState
from worker.sampling.uniforms import uniforms

VOCAB = 300
EOS = 2


def make_state(num_rows: int = 8) -> SamplingState:
    return SamplingState(num_rows=num_rows, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))


def give(state: SamplingState, row: int, prompt=(1,), output=(), choice: int = 0, **params) -> None:
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    state.set(row, sampling, choice, np.array(prompt, np.int64), np.array(output, np.int64))


def logits_of(*seeds: int) -> torch.Tensor:
    return torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3 for seed in seeds])


def draw_rows(
    state: SamplingState, logits: torch.Tensor, rows: list[int], positions: list[int], kernels=None
) -> Sampled:
    scores = Logits(logits_LV=logits.clone().numpy())
    return sample(scores, np.arange(len(rows)), state, np.array(rows), np.array(positions), kernels)


def one(state: SamplingState, logits_V: torch.Tensor, position: int = 0, row: int = 0, kernels=None) -> int:
    return int(draw_rows(state, logits_V[None], [row], [position], kernels).token_ids_N[0])


@pytest.fixture(params=["native", "numpy"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels | None:
    """The kernels that draw; None: numpy."""
    return native() if request.param == "native" else None


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 1.0, "frequency_penalty": -0.5, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 5.0}, "min_tokens": 4, "logprobs": 0},
]


def test_a_row_samples_the_same_alone_and_in_any_batch(kernels: NativeKernels | None):
    state, logits = make_state(), logits_of(*range(6))
    for row, params in enumerate(MIXED):
        give(state, row, prompt=(1, 5, 9), output=(9, 11), **params)
    alone = [one(state, logits[row], 2, row, kernels) for row in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 1]):
        together = draw_rows(state, logits[order], order, [2] * len(order), kernels)
        assert together.token_ids_N.tolist() == [alone[row] for row in order]
        assert not together.failed_N.any()


def test_rows_that_are_merely_greedy_need_no_logits():
    """They use only a head's argmax, for which no logits are kept: also after drafts, and if it is not finite."""
    state, logits = make_state(), logits_of(1, 2, 3, 4)
    logits[2, 7] = float("nan")
    for row in range(3):
        give(state, row)
    assert not state.needs_logits(np.array([0, 1, 2]))
    with_logits = draw_rows(state, logits, [0, 1, 2, 0], [0] * 4)
    token_ids_L, largest_L = greedy(logits.numpy())
    scores = Greedy(token_ids_L=torch.from_numpy(token_ids_L), largest_L=torch.from_numpy(largest_L))
    without = sample(scores, np.arange(4), state, np.array([0, 1, 2, 0]), np.zeros(4, np.int64), None)
    assert without.token_ids_N.tolist() == with_logits.token_ids_N.tolist()
    assert without.failed_N.tolist() == with_logits.failed_N.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0, "seed": 1}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"presence_penalty": 1.0}]
)
def test_one_row_that_is_more_than_greedy_needs_logits(params: dict[str, Any]):
    state = make_state()
    for row in range(3):
        give(state, row, **params if row == 1 else {})
    assert state.needs_logits(np.array([0, 1, 2]))
    assert not state.needs_logits(np.array([0, 2]))


def test_the_draw_is_the_reference_with_the_rows_own_uniform():
    for position, seed in enumerate([0, 5, 2**64 - 1]):
        state, logits_V = make_state(), logits_of(seed % 97)[0]
        give(state, 3, choice=4, temperature=0.8, seed=seed, top_k=50, top_p=0.95, min_p=0.01)
        uniform = uniforms(np.array([seed], np.uint64), np.array([4]), np.array([position]))[0]
        expected = draw_reference(logits_V, temperature=0.8, uniform=uniform, top_k=50, top_p=0.95, min_p=0.01)
        assert one(state, logits_V, position, 3) == expected


def test_each_position_choice_and_seed_draws_its_own_number():
    state, logits_V = make_state(), torch.zeros(VOCAB)
    give(state, 0, temperature=1.0, seed=1)
    give(state, 1, temperature=1.0, seed=1, choice=1)
    give(state, 2, temperature=1.0, seed=2)
    drawn = [[one(state, logits_V, position, row) for position in range(20)] for row in range(3)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) > 10


def test_penalties_count_what_was_appended():
    params: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    prompt, output, logits_V = [1, 2, 3], [3, 4], logits_of(1)[0]
    state = make_state()
    give(state, 0, prompt, output, **params)
    for token in range(100, 230):
        state.append(0, token)
    state.append(0, 4)
    grown = [*output, *range(100, 230), 4]
    expected = penalties_reference(logits_V, prompt, grown, repetition=1.5, presence=0.5, frequency=0.25)
    adjusted = logits_V.clone()
    state.adjust(0, adjusted.numpy())
    torch.testing.assert_close(adjusted, expected, atol=1e-6, rtol=0)
    # A sequence that is computed again from its tokens must continue exactly as if it had never left.
    again = make_state()
    give(again, 0, prompt, grown, **params)
    from_tokens = logits_V.clone()
    again.adjust(0, from_tokens.numpy())
    assert torch.equal(from_tokens, adjusted)


def test_bias_comes_before_penalties():
    state, logits_V = make_state(), torch.zeros(VOCAB)
    give(state, 0, prompt=(1,), logit_bias={1: 8.0, 5: 3.0}, repetition_penalty=4.0)
    # (0 + 8) / 4 = 2 is below 3; (0 / 4) + 8 would win.
    assert one(state, logits_V) == 5


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, 9), (True, EOS)])
def test_min_tokens_bans_ends_until_it_is_reached(ignore_eos: bool, expected: int):
    state, logits_V = make_state(), torch.zeros(VOCAB)
    logits_V[[EOS, 30, 9]] = torch.tensor([5.0, 6.0, 4.0])
    give(state, 0, output=(1,), min_tokens=3, stop_token_ids=[30], ignore_eos=ignore_eos)
    assert one(state, logits_V) == expected
    state.append(0, 9)
    assert one(state, logits_V) == expected
    state.append(0, 9)
    assert one(state, logits_V) == 30


def test_tiny_temperatures_are_greedy_and_small_ones_do_not_overflow():
    logits_V = logits_of(3)[0] * 1e4
    state = make_state()
    give(state, 0, temperature=1e-6)
    give(state, 1, temperature=2e-5, seed=9)
    assert one(state, logits_V) == int(logits_V.argmax())
    assert one(state, logits_V, row=1) == int(logits_V.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("adjusted", [False, True])
def test_logits_that_are_not_finite_fail_their_row_alone(
    temperature: float, bad: float, adjusted: bool, kernels: NativeKernels | None
):
    state, logits = make_state(), logits_of(1, 2, 3)
    for row in range(3):
        # A penalty would make the infinite logit of a known token finite.
        give(
            state,
            row,
            prompt=(50,),
            temperature=temperature,
            seed=row,
            logprobs=2,
            repetition_penalty=1.5 if adjusted else 1.0,
        )
    expected = draw_rows(state, logits, [0, 1, 2], [0, 0, 0], kernels).token_ids_N.tolist()
    logits[1, 50] = bad
    result = draw_rows(state, logits, [0, 1, 2], [0, 0, 0], kernels)
    assert result.failed_N.tolist() == [False, True, False]
    assert result.token_ids_N[[0, 2]].tolist() == [expected[0], expected[2]]
    assert result.logprobs[2].chosen.token_id == expected[2]


def test_logprobs_are_the_models_own():
    state, logits = make_state(), logits_of(1, 2)
    give(state, 0, temperature=0.5, seed=1, logit_bias={42: 100.0}, logprobs=4)
    give(state, 1)
    result = draw_rows(state, logits, [0, 1], [0, 0])
    assert list(result.logprobs) == [0]
    entry, own = result.logprobs[0], torch.log_softmax(logits[0].double(), -1)
    assert entry.chosen.token_id == 42
    assert entry.chosen.logprob == pytest.approx(float(own[42]), abs=1e-5)
    assert entry.chosen.rank == int((own > own[42]).sum()) + 1
    assert [top.token_id for top in entry.top] == own.topk(4).indices.tolist()
    assert [top.rank for top in entry.top] == [1, 2, 3, 4]
    torch.testing.assert_close(torch.tensor([top.logprob for top in entry.top]), own.topk(4).values.float())


def test_top_logprobs_list_equals_by_id():
    state, logits_V = make_state(), torch.zeros(VOCAB)
    logits_V[[9, 4, 7]] = 1.0
    give(state, 0, logprobs=3)
    entry = draw_rows(state, logits_V[None], [0], [0]).logprobs[0]
    assert [top.token_id for top in entry.top] == [4, 7, 9]
    assert (entry.chosen.token_id, entry.chosen.rank) == (4, 1)
