"""kernels/sampling against its plain reference, and the properties that resuming elsewhere rests on."""

import numpy as np
import pytest
import torch

from kernels.sampling import apply_logit_bias, apply_penalties, draw, greedy, most_likely
from kernels.sampling.reference import filtered_cdf_reference, penalties_reference

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


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_draw_agrees_with_the_reference(vocab_size: int, spread: float):
    # Sharp rows are covered by the first candidates, flat ones need the full sort: all ways must agree.
    rng = np.random.default_rng(vocab_size)
    num_rows, num_uniforms = (1, 1) if vocab_size > 10_000 else (2, 10)
    for row, logits_V in enumerate(random_logits(num_rows, vocab_size, spread)):
        for filters in FILTERS:
            cdf_V = filtered_cdf_reference(logits_V, temperature=0.9, **filters)
            for uniform in rng.random(num_uniforms):
                expected = int(torch.searchsorted(cdf_V, uniform, right=True))
                got = draw(logits_V.numpy(), temperature=0.9, uniform=uniform, **filters)
                # A uniform within rounding of a step of the CDF may fall to either side (float32 sums: 2**-22 of 1).
                near = abs(float(cdf_V[min(got, expected)]) - uniform) < 2**-20
                assert got == expected or near, (row, filters, uniform)


@pytest.mark.parametrize("filters", FILTERS)
def test_ends_of_the_unit_interval_draw_kept_tokens(filters: dict):
    # Rounding must never walk off the row, or onto a token of no weight.
    logits_V = random_logits(1, 3000, 3.0)[0]
    logits_V[:10] = logits_V[-700:] = float("-inf")
    cdf_V = filtered_cdf_reference(logits_V, temperature=1.0, **filters)
    kept = torch.nonzero(torch.diff(cdf_V, prepend=torch.zeros(1, dtype=torch.float64))).flatten().tolist()
    assert draw(logits_V.numpy(), temperature=1.0, uniform=0.0, **filters) == kept[0]
    assert draw(logits_V.numpy(), temperature=1.0, uniform=1 - 2**-53, **filters) == kept[-1]


def test_equal_tokens_stay_or_go_together():
    # bfloat16 logits are full of ties: which of several equals survives must not hang on how a sort breaks them.
    flat_V = np.zeros(600, np.float32)
    drawn = {draw(flat_V, temperature=1.0, uniform=u, top_k=3) for u in np.linspace(0, 0.9999, 600)}
    assert drawn == set(range(600))
    few_V = np.full(600, -np.inf, np.float32)
    few_V[[5, 70, 500]] = np.log([0.4, 0.3, 0.3])
    assert {draw(few_V, temperature=1.0, uniform=u, top_p=0.7) for u in np.linspace(0, 0.9999, 50)} == {5, 70, 500}


def test_a_row_of_a_batch_is_drawn_as_if_alone():
    # A view at any offset, or of another layout, must give what a copy of its own gives.
    logits_SV = random_logits(9, 5001, 2.0).numpy()
    columns_SV = np.asfortranarray(logits_SV)
    for i, filters in enumerate(FILTERS[:9]):
        for uniform in (0.1, 0.5, 0.93):
            alone = draw(logits_SV[i].copy(), temperature=0.7, uniform=uniform, **filters)
            assert draw(logits_SV[i], temperature=0.7, uniform=uniform, **filters) == alone
            assert draw(columns_SV[i], temperature=0.7, uniform=uniform, **filters) == alone


def test_draws_follow_the_filtered_distribution():
    # Chi-square of 5,000 draws on fixed uniforms; 99.9th percentile of chi-square with 9 degrees of freedom: 27.9.
    logits_V = random_logits(1, 700, 2.0)[0]
    count = 5_000
    uniforms = np.random.default_rng(2).random(count).tolist()
    drawn = np.array([draw(logits_V.numpy(), temperature=1.0, uniform=uniform, top_k=10) for uniform in uniforms])
    top = torch.softmax(logits_V, -1).topk(10)
    expected = (top.values / top.values.sum()).numpy() * count
    observed = np.array([(drawn == token).sum() for token in top.indices.numpy()])
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 27.9


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
    apply_penalties(
        changed.numpy(), ids, counts, repetition=repetition, presence=presence, frequency=frequency
    )
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
