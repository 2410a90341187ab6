"""Prices of a step's parts, learned from whole steps."""

from random import Random

import pytest

from scheduler.core.pacing.prices import Prices, StepWork, pairs_of

# What steps of these tests really cost.
STEP, DECODE, CONTEXT, TOKEN, PAIR, EMBEDDING = 0.004, 0.0004, 1e-6, 0.0006, 4e-7, 0.001


def work_of(choose: Random) -> StepWork:
    num_decodes = choose.randint(0, 64)
    count = choose.choice([0, 0, choose.randint(1, 400)])
    return StepWork(
        num_prefill_tokens=count,
        num_pairs=pairs_of(choose.randint(0, 4000), count),
        num_decode_tokens=num_decodes,
        num_context_tokens=num_decodes * choose.randint(50, 800),
        num_embeddings=choose.choice([0, 0, 64]) if count else 0,
    )


def seconds_of(work: StepWork) -> float:
    return (
        STEP
        + DECODE * work.num_decode_tokens
        + CONTEXT * work.num_context_tokens
        + TOKEN * work.num_prefill_tokens
        + PAIR * work.num_pairs
        + EMBEDDING * work.num_embeddings
    )


def learned(*, noise: float = 0.0, bursts: float = 0.0, num_steps: int = 600, factor: float = 1.0) -> Prices:
    choose, prices = Random(1), Prices()
    for _ in range(num_steps):
        work = work_of(choose)
        seconds = factor * seconds_of(work) * choose.lognormvariate(0, noise)
        prices.note(work, 8 * seconds if choose.random() < bursts else seconds)
        prices.seconds(work)
    return prices


def worst_error(prices: Prices, factor: float = 1.0) -> float:
    """Over steps like those that were learned, none of them among these."""
    choose = Random(2)
    tries = [work_of(choose) for _ in range(200)]
    return max(abs(prices.seconds(work) / (factor * seconds_of(work)) - 1) for work in tries)


def test_steps_that_it_has_not_seen_are_predicted():
    assert worst_error(learned()) < 0.02


def test_noise_and_bursts_of_other_programs_hardly_count():
    assert worst_error(learned(noise=0.1)) < 0.08
    # One step of twenty takes eight times as long.
    assert worst_error(learned(bursts=0.05)) < 0.15


def test_a_slower_machine_is_noticed_after_some_hundred_steps():
    prices, choose = learned(), Random(3)
    for _ in range(1000):
        work = work_of(choose)
        prices.note(work, 2 * seconds_of(work))
        prices.seconds(work)
    # Errors are relative, so the quick steps of before weigh four times as much as the slow ones.
    assert worst_error(prices, factor=2.0) < 0.1


def test_prices_of_prefills_outlast_a_long_time_without_any():
    prices, choose = learned(), Random(4)
    for _ in range(5000):
        work = StepWork(num_decode_tokens=8, num_context_tokens=8 * choose.randint(50, 800))
        prices.note(work, seconds_of(work))
        prices.seconds(work)
    assert worst_error(prices) < 0.1


@pytest.mark.parametrize("start", [0, 100, 4000])
@pytest.mark.parametrize("seconds", [0.0001, 0.01, 0.15, 3.0])
def test_as_many_tokens_as_there_is_time_for_and_no_more(start: int, seconds: float):
    prices = learned()
    count = prices.num_prefill_tokens(seconds, start, most=100_000)
    assert prices.prefill_seconds(start, count) <= seconds * (1 + 1e-9)
    assert prices.prefill_seconds(start, count + 1) > seconds
    assert prices.num_prefill_tokens(seconds, start, most=7) == min(count, 7)


def test_without_a_measured_step_nothing_has_a_price():
    prices = Prices()
    assert prices.seconds(StepWork(num_prefill_tokens=9)) == 0
    assert prices.num_prefill_tokens(0.1, 0, most=50) == 50
    # Decodes have taken all the time.
    assert prices.num_prefill_tokens(0.0, 0, most=50) == 0


def test_a_first_step_is_put_down_to_its_tokens():
    prices = Prices()
    prices.note(StepWork(num_prefill_tokens=100, num_pairs=pairs_of(0, 100)), 0.2)
    assert prices.num_prefill_tokens(0.1, 0, most=1000) == pytest.approx(50, abs=1)


def test_what_is_saved_goes_on_exactly_as_the_original():
    prices, copy = learned(num_steps=50), Prices()
    copy.restore(prices.save())
    choose = Random(5)
    for _ in range(50):
        work = work_of(choose)
        for each in (prices, copy):
            each.note(work, seconds_of(work))
        assert prices.seconds(work) == copy.seconds(work)
    assert prices.save() == copy.save()
    with pytest.raises(ValueError, match="lists of"):
        Prices().restore([[0.0]])
