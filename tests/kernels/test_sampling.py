"""kernels/sampling against its plain reference, and the properties that resuming elsewhere rests on."""

import numpy as np
import pytest
import torch

from kernels.sampling import apply_logit_bias, apply_penalties, draw, greedy
from kernels.sampling.reference import draw_reference, filtered_cdf_reference, penalties_reference

FILTERS = [
    # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 0.9999999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (50, 0.9, 0.02),
    (300, 0.99, 0.0),
    (10**9, 1.0, 0.0),
    (10**9, 0.7, 0.0),
]


def probabilities(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return torch.softmax(logits, -1)


def draw_one(probs_V: torch.Tensor, uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    return int(
        draw(probs_V[None], np.array([uniform]), np.array([top_k]), np.array([top_p]), np.array([min_p], np.float32))[0]
    )


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_draw_agrees_with_the_reference(vocab_size: int, spread: float):
    # Sharp rows are covered by the first candidates, flat ones need the full sort: all three ways must agree.
    rng = np.random.default_rng(vocab_size)
    num_rows, num_uniforms = (1, 2) if vocab_size > 10_000 else (2, 10)
    for row, probs_V in enumerate(probabilities(num_rows, vocab_size, spread)):
        for top_k, top_p, min_p in FILTERS:
            top_k = min(top_k, vocab_size + 1)
            cdf_V = filtered_cdf_reference(probs_V, top_k, top_p, min_p)
            for uniform in rng.random(num_uniforms):
                expected = draw_reference(probs_V, uniform, top_k, top_p, min_p)
                got = draw_one(probs_V, uniform, top_k, top_p, min_p)
                # A uniform within rounding of a step of the CDF may fall to either side (float32 sums: 2**-22 of 1).
                near = abs(float(cdf_V[min(got, expected)]) - uniform) < 2**-20
                assert got == expected or near, (row, top_k, top_p, min_p, uniform)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_ends_of_the_unit_interval_draw_kept_tokens(top_k: int, top_p: float, min_p: float):
    # Rounding must never walk off the row, or onto a token of no weight.
    probs_V = probabilities(1, 3000, 3.0)[0]
    probs_V[:10] = 0
    probs_V[-700:] = 0
    cdf_V = filtered_cdf_reference(probs_V, min(top_k, 3000), top_p, min_p)
    steps_V = torch.diff(cdf_V, prepend=torch.zeros(1, dtype=torch.float64))
    kept = torch.nonzero(steps_V).flatten().tolist()
    assert draw_one(probs_V, 0.0, top_k, top_p, min_p) == kept[0]
    assert draw_one(probs_V, 1 - 2**-53, top_k, top_p, min_p) == kept[-1]


def test_equal_tokens_stay_or_go_together():
    # bfloat16 logits are full of ties: which of several equals survives must not hang on how a sort breaks them.
    probs_V = torch.full((600,), 1 / 600)
    drawn = {draw_one(probs_V, u, 3, 1.0, 0.0) for u in np.linspace(0, 0.9999, 400)}
    assert len(drawn) > 300
    probs_V = torch.zeros(600)
    probs_V[[5, 70, 500]] = torch.tensor([0.4, 0.3, 0.3])
    assert {draw_one(probs_V, u, 0, 0.7, 0.0) for u in np.linspace(0, 0.9999, 50)} == {5, 70, 500}


def test_a_row_does_not_depend_on_its_batch():
    probs_SV = probabilities(17, 5000, 2.0)
    rng = np.random.default_rng(1)
    uniforms_S = rng.random(17)
    top_k_S, top_p_S = rng.choice([0, 1, 40, 900], 17), rng.choice([1.0, 0.5, 0.99], 17)
    min_p_S = rng.choice([0.0, 0.05], 17).astype(np.float32)
    together = draw(probs_SV, uniforms_S, top_k_S, top_p_S, min_p_S)
    for i in range(17):
        alone = draw_one(probs_SV[i].clone(), uniforms_S[i], top_k_S[i], top_p_S[i], min_p_S[i])
        assert alone == together[i]


def test_draws_follow_the_filtered_distribution():
    # Chi-square of 5,000 draws on fixed uniforms; 99.9th percentile of chi-square with 9 degrees of freedom: 27.9.
    probs_V = probabilities(1, 700, 2.0)[0]
    uniforms_S = np.random.default_rng(2).random(5_000)
    count = len(uniforms_S)
    drawn = np.concatenate(
        [
            draw(probs_V.expand(1000, -1).contiguous(), part, np.full(1000, 10), np.ones(1000), np.zeros(1000, np.float32))
            for part in uniforms_S.reshape(5, 1000)
        ]
    )
    top = probs_V.topk(10)
    expected = (top.values / top.values.sum()).numpy() * count
    observed = np.array([(drawn == token).sum() for token in top.indices.numpy()])
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 27.9


def test_greedy_takes_the_lowest_of_equals_and_shows_what_is_not_finite():
    logits = torch.zeros(4, 1000)
    logits[0, [3, 700]] = 5.0
    logits[1, 10], logits[1, 20] = float("nan"), 9.0
    logits[2, 30] = float("inf")
    logits[3] = float("-inf")
    tokens, largest = greedy(logits)
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
