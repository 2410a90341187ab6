"""kernels/sampling against its plain reference, and the properties on which resuming elsewhere relies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native.library import NativeKernels
from kernels.sampling import apply_logit_bias, apply_penalties, draw, draw_rows, greedy, most_likely
from kernels.sampling.reference import filtered_cdf_reference, penalties_reference
from tests.support.kernels.kernel_paths import native

FILTERS = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k, top_p, min_p in (
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.95, 0.0),
        (0, 0.9999999, 0.0),
        (0, 1e-6, 0.0),
        (0, 1.0, 0.1),
        (0, 1.0, 1.0),
        (0, 0.9, 0.05),
        (50, 0.9, 0.02),
        (300, 0.99, 0.0),
        (10**9, 1.0, 0.0),
        (10**9, 0.7, 0.0),
    )
]


Draw = Callable[..., int]


def draw_natively(
    logits_V: np.ndarray, *, temperature: float, uniform: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """`draw`, computed by the C++ kernels."""
    parameters = {"temperature": temperature, "uniform": uniform, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return int(draw_many(np.ascontiguousarray(logits_V)[None], [(0, parameters)], native())[0])


def draw_many(
    logits_LV: np.ndarray, draws: list[tuple[int, dict[str, Any]]], kernels: NativeKernels | None
) -> np.ndarray:
    """draws: (row, parameters) of each."""
    columns: dict[str, Any] = {
        f"{name}_N": np.array([parameters[name] for _, parameters in draws])
        for name in ("temperature", "uniform", "top_k", "top_p", "min_p")
    }
    return draw_rows(logits_LV, np.array([row for row, _ in draws]), **columns, kernels=kernels)


@pytest.fixture(params=[draw, draw_natively], ids=["numpy", "native"])
def draw_one(request: pytest.FixtureRequest) -> Draw:
    return request.param


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab_size", [1, 5, 256, 257, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_draw_agrees_with_the_reference(draw_one: Draw, vocab_size: int, spread: float):
    # The first candidates cover sharp rows; flat rows need all tokens. All paths must agree.
    rng = np.random.default_rng(vocab_size)
    num_rows, num_uniforms = (1, 1) if vocab_size > 10_000 else (2, 10)
    for row, logits_V in enumerate(random_logits(num_rows, vocab_size, spread)):
        for filters in FILTERS:
            cdf_V = filtered_cdf_reference(logits_V, temperature=0.9, **filters)
            for uniform in rng.random(num_uniforms):
                expected = int(torch.searchsorted(cdf_V, uniform, right=True))
                got = draw_one(logits_V.numpy(), temperature=0.9, uniform=uniform, **filters)
                # A uniform within rounding of a step of the CDF may fall to either side (float32 sums: 2**-22 of 1).
                near = abs(float(cdf_V[min(got, expected)]) - uniform) < 2**-20
                assert got == expected or near, (row, filters, uniform)


@pytest.mark.parametrize("filters", FILTERS)
def test_ends_of_the_unit_interval_draw_kept_tokens(draw_one: Draw, filters: dict):
    # Rounding must never lead beyond the row, or to a token without weight.
    logits_V = random_logits(1, 3000, 3.0)[0]
    logits_V[:10] = logits_V[-700:] = float("-inf")
    cdf_V = filtered_cdf_reference(logits_V, temperature=1.0, **filters)
    kept = torch.nonzero(torch.diff(cdf_V, prepend=torch.zeros(1, dtype=torch.float64))).flatten().tolist()
    assert draw_one(logits_V.numpy(), temperature=1.0, uniform=0.0, **filters) == kept[0]
    assert draw_one(logits_V.numpy(), temperature=1.0, uniform=1 - 2**-53, **filters) == kept[-1]


def test_equal_tokens_stay_or_go_together(draw_one: Draw):
    # bfloat16 logits are full of ties: how a sort breaks them must not decide which of several equals survives.
    flat_V = np.zeros(600, np.float32)
    drawn = {draw_one(flat_V, temperature=1.0, uniform=u, top_k=3) for u in np.linspace(0, 0.9999, 600)}
    assert drawn == set(range(600))
    few_V = np.full(600, -np.inf, np.float32)
    few_V[[5, 70, 500]] = np.log([0.4, 0.3, 0.3])
    assert {draw_one(few_V, temperature=1.0, uniform=u, top_p=0.7) for u in np.linspace(0, 0.9999, 50)} == {5, 70, 500}


def test_a_row_of_a_batch_is_drawn_as_if_alone():
    # A view at any offset, or in another layout, must give the same as a copy.
    logits_SV = random_logits(9, 5001, 2.0).numpy()
    columns_SV = np.asfortranarray(logits_SV)
    for i, filters in enumerate(FILTERS[:9]):
        for uniform in (0.1, 0.5, 0.93):
            alone = draw(logits_SV[i].copy(), temperature=0.7, uniform=uniform, **filters)
            assert draw(logits_SV[i], temperature=0.7, uniform=uniform, **filters) == alone
            assert draw(columns_SV[i], temperature=0.7, uniform=uniform, **filters) == alone


def test_draws_follow_the_filtered_distribution(draw_one: Draw):
    # Chi-square of 5,000 draws on fixed uniforms; 99.9th percentile of chi-square with 9 degrees of freedom: 27.9.
    logits_V = random_logits(1, 700, 2.0)[0]
    count = 5_000
    uniforms = np.random.default_rng(2).random(count).tolist()
    drawn = np.array([draw_one(logits_V.numpy(), temperature=1.0, uniform=uniform, top_k=10) for uniform in uniforms])
    top = torch.softmax(logits_V, -1).topk(10)
    expected = (top.values / top.values.sum()).numpy() * count
    observed = np.array([(drawn == token).sum() for token in top.indices.numpy()])
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 27.9


def test_rows_are_drawn_as_if_alone_on_any_number_of_threads():
    kernels = native()
    logits_LV = random_logits(7, 5001, 2.0).numpy()
    rng = np.random.default_rng(3)
    draws = [
        (int(rng.integers(7)), {"temperature": 0.7, "uniform": float(rng.random()), **filters})
        for filters in FILTERS
        for _ in range(4)
    ]
    alone = [draw_natively(logits_LV[row], **parameters) for row, parameters in draws]
    try:
        for threads in (1, 2, 5):
            kernels.set_threads(threads)
            order = rng.permutation(len(draws))
            together = draw_many(logits_LV, [draws[i] for i in order], kernels)
            assert together.tolist() == [alone[i] for i in order]
    finally:
        kernels.set_threads(torch.get_num_threads())


@pytest.mark.parametrize("way", ["numpy", "native"])
@pytest.mark.parametrize("filters", FILTERS[::3])
def test_rows_that_cannot_be_drawn_from_say_so_alone(way: str, filters: dict):
    logits_LV = random_logits(5, 261, 1.0).numpy()
    # In the last vector, in the middle of a block, everywhere.
    logits_LV[0, 260], logits_LV[1, 77], logits_LV[2, 3], logits_LV[3] = np.nan, np.nan, np.inf, -np.inf
    parameters = {"temperature": 1.0, "uniform": 0.5, **filters}
    tokens = draw_many(logits_LV, [(row, parameters) for row in range(5)], native() if way == "native" else None)
    assert tokens[:4].tolist() == [-1] * 4
    assert tokens[4] == draw(logits_LV[4], **parameters)


@pytest.mark.parametrize("temperature", [2e-5, 0.3, 100.0])
@pytest.mark.parametrize("size", [1.0, 1e4, 3e38])
def test_no_temperature_and_no_size_of_logits_overflows(draw_one: Draw, temperature: float, size: float):
    """At 3e38 the difference of two logits is infinite; a temperature near 0 leaves only the largest logit."""
    logits_V = np.linspace(-1, 1, 300, dtype=np.float32) * np.float32(size)
    for filters in ({}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.5}):
        cdf_V = filtered_cdf_reference(torch.from_numpy(logits_V), temperature=temperature, **filters)
        for uniform in (0.0, 0.4, 0.97):
            token = draw_one(logits_V, temperature=temperature, uniform=uniform, **filters)
            low, high = float(cdf_V[token - 1]) if token else 0.0, float(cdf_V[token])
            assert low - 1e-5 <= uniform < high + 1e-5


@st.composite
def awkward_logits(pick: st.DrawFn) -> np.ndarray:
    """Rows of any size, with few or many distinct values, some tokens without weight, and the likeliest anywhere."""
    rng = np.random.default_rng(pick(st.integers(0, 2**32)))
    logits_V = rng.standard_normal(pick(st.integers(1, 1200))) * pick(st.sampled_from([0.0, 1e-6, 0.1, 3.0, 40.0]))
    if pick(st.booleans()):
        logits_V = np.round(logits_V * 2) / 2
    if pick(st.booleans()):
        logits_V[rng.random(len(logits_V)) < 0.7] = -np.inf
    logits_V[rng.integers(len(logits_V))] = pick(st.sampled_from([0.0, 5.0, 60.0]))
    return logits_V.astype(np.float32) + np.float32(pick(st.sampled_from([0.0, -300.0, 1000.0])))


@settings(derandomize=True, deadline=None)
@given(
    logits_V=awkward_logits(),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 30.0]),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
    top_k=st.one_of(st.just(0), st.integers(1, 1300)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
def test_a_draw_lies_in_its_part_of_the_cdf(
    logits_V: np.ndarray, temperature: float, uniform: float, top_k: int, top_p: float, min_p: float
):
    """`uniform` lies in the drawn token's part of the cdf, with filters cut slightly wider or narrower. Rounding
    moves weights by some 2^-20, so only the choice of the last among nearly equal tokens may differ."""
    token = draw_natively(logits_V, temperature=temperature, uniform=uniform, top_k=top_k, top_p=top_p, min_p=min_p)
    weights_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / np.float32(temperature))
    narrow_V, wide_V = (
        # Weights that are equal in float32 stay together.
        np.where(weights_V >= min(1.0, least_weight(weights_V, top_k, top_p * factor, min_p) / factor), weights_V, 0.0)
        for factor in (1 - 2**-16, 1 + 2**-16)
    )
    assert weights_V[token] > 0
    # The least and the most that can come before the token, and up to it, if some of the doubtful ones are kept.
    low = narrow_V[:token].sum() / (narrow_V[:token].sum() + wide_V[token:].sum())
    high = wide_V[: token + 1].sum() / (wide_V[: token + 1].sum() + narrow_V[token + 1 :].sum())
    assert low - 2**-14 <= uniform <= high + 2**-14


def least_weight(weights_V: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    sorted_V = np.sort(weights_V)[::-1]
    if top_k:
        sorted_V = sorted_V[:top_k]
    cumulative = sorted_V.cumsum()
    last = min(int(cumulative.searchsorted(min(1.0, top_p) * cumulative[-1])), len(sorted_V) - 1)
    return max(float(sorted_V[-1]), float(sorted_V[last]) if top_p < 1 else 0.0, min_p)


@pytest.mark.parametrize("count", [1, 20, 300, 999, 1000, 5000])
def test_most_likely_lists_equals_by_id(count: int):
    logits_V = random_logits(1, 1000, 2.0)[0].round().numpy()
    expected = sorted(range(1000), key=lambda token: (-logits_V[token], token))[:count]
    assert most_likely(logits_V, count).tolist() == expected


def test_greedy_takes_the_lowest_of_equals_and_shows_what_is_not_finite():
    logits = torch.zeros(4, 1000)
    logits[0, [3, 700]] = 5.0
    logits[1, 10], logits[1, 20] = float("nan"), 9.0
    logits[2, 30] = float("inf")
    logits[3] = float("-inf")
    tokens, largest = greedy(logits.numpy())
    assert tokens[0] == 3
    assert np.isfinite(largest).tolist() == [True, False, False, False]


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.5])
@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (0.7, 0.0), (-0.5, 1.5)])
def test_penalties_agree_with_the_reference(repetition: float, presence: float, frequency: float):
    prompt, output = [1, 2, 2, 5], [2, 7, 7, 7, 9]
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    ids = np.unique(prompt + output)
    counts = np.array([output.count(token) for token in ids.tolist()])
    changed = logits.clone()
    apply_penalties(changed.numpy(), ids, counts, repetition=repetition, presence=presence, frequency=frequency)
    expected = penalties_reference(
        logits, prompt, output, repetition=repetition, presence=presence, frequency=frequency
    )
    torch.testing.assert_close(changed, expected, atol=1e-6, rtol=0)


def test_a_tiny_repetition_penalty_leaves_logits_finite():
    logits = np.array([30.0, -30.0], np.float32)
    apply_penalties(logits, np.array([0, 1]), np.array([0, 0]), repetition=1e-38)
    assert np.isfinite(logits).all()


def test_logit_bias_is_added():
    logits = np.zeros(5, np.float32)
    apply_logit_bias(logits, np.array([4, 1]), np.array([-100, 2.5], np.float32))
    assert logits.tolist() == [0, 2.5, 0, 0, -100]
