"""How many drafts pay."""

from itertools import product

import numpy as np
import pytest

from scheduler.core.drafting.choice import LEAST_GAIN_OF_WORKERS, MOST_RATE, CostTable, choose_counts, choose_depth
from scheduler.core.messages import StepCosts


def table(seconds: dict[int, float], draft_seconds: tuple[float, ...] = (), choosing_seconds: float = 0.0) -> CostTable:
    costs = CostTable()
    costs.set(
        StepCosts(
            num_tokens=tuple(seconds),
            seconds=tuple(seconds.values()),
            draft_seconds=draft_seconds,
            choosing_seconds=choosing_seconds,
        )
    )
    return costs


def counts_of(rates: list[float], costs: CostTable, *, most: int = 4, budget: int = 100) -> list[int]:
    return choose_counts(
        np.array(rates),
        np.full(len(rates), most),
        num_rows=len(rates),
        num_tokens=len(rates),
        budget=budget,
        costs=costs,
    ).tolist()


def tokens_a_second(rates: list[float], counts: tuple[int, ...], costs: CostTable) -> float:
    gained = sum(rate**i for rate, count in zip(rates, counts, strict=True) for i in range(1, count + 1))
    return (len(rates) + gained) / float(costs.seconds(len(rates) + sum(counts), 1)[0])


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.1], [0.6, 0.61, 0.3], [0.95, 0.05, 0.8]])
def test_no_other_choice_gives_more_tokens_a_second(rates: list[float], slope: float) -> None:
    costs = table({1: 1.0, 101: 1.0 + 100 * slope})
    best = max(product(range(5), repeat=3), key=lambda counts: tokens_a_second(rates, counts, costs))
    chosen = tuple(counts_of(rates, costs))
    # Where little is gained, none are chosen.
    none = tokens_a_second(rates, (0, 0, 0), costs)
    assert tokens_a_second(rates, chosen, costs) * 1.03 >= tokens_a_second(rates, best, costs)
    assert chosen == (0, 0, 0) or tokens_a_second(rates, chosen, costs) > none


def test_drafts_that_do_not_pay_are_not_chosen() -> None:
    assert counts_of([0.9, 0.9], table({1: 1.0, 11: 11.0})) == [0, 0]
    assert counts_of([0.0, 0.0], table({1: 1.0, 11: 1.0})) == [0, 0]
    assert counts_of([0.9, 0.9], table({1: 1.0, 11: 1.0})) == [4, 4]


def test_the_budget_goes_to_the_likeliest() -> None:
    assert counts_of([0.9, 0.5], table({1: 1.0, 11: 1.0}), budget=3) == [3, 0]
    assert counts_of([0.9, 0.5], table({1: 1.0, 11: 1.0}), budget=0) == [0, 0]


def test_costs_never_fall_and_go_on_behind_the_last() -> None:
    seconds = table({1: 2.0, 3: 1.0, 5: 4.0}).seconds(1, 7).tolist()
    assert seconds == [2.0, 2.0, 2.0, 2.5, 4.0, 4.5, 5.0]
    # Not as steep as from 15 to 16.
    assert table({1: 1.0, 8: 1.5, 15: 3.1, 16: 3.1}).seconds(24, 1).tolist() == pytest.approx([4.7])
    assert table({1: 2.0}).seconds(1, 2).tolist() == pytest.approx([2.0, 2.2])


def test_the_workers_draft_as_deep_as_it_pays() -> None:
    values = 0.8 ** np.arange(1, 5)
    depth, saved = choose_depth(values, 1, 1, table({1: 1.0, 11: 1.0}, (0.0, 0.0)))
    # 3.36 tokens in the time of one, of which the least gain may be an error.
    assert (depth, saved) == (4, pytest.approx(1 - LEAST_GAIN_OF_WORKERS / (1 + values.sum())))
    assert 0 < choose_depth(values, 1, 1, table({1: 1.0, 11: 1.0}, (0.3, 0.3)))[0] < 4
    assert choose_depth(values, 1, 1, table({1: 1.0, 11: 1.0}, (2.0, 2.0))) == (0, 0.0)


def test_some_drafts_could_pay_if_the_likeliest_do() -> None:
    for slope, num_rows, num_tokens in product((0.02, 0.2, 0.5, 0.97), (1, 3), (0, 40)):
        costs = table({1: 1.0, 101: 1.0 + 100 * slope})
        rates = np.full(num_rows, MOST_RATE)
        chosen = choose_counts(
            rates, np.full(num_rows, 4), num_rows=num_rows, num_tokens=num_rows + num_tokens, budget=99, costs=costs
        )
        assert costs.could_pay(num_rows, num_rows + num_tokens, 4) == chosen.any()


def test_the_time_of_prefills_makes_no_draft_cheaper() -> None:
    # A draft takes 0.9 of a token's time, whatever else is in the step.
    costs = table({1: 1.0, 1001: 901.0})
    for num_prefill_tokens in (0, 50, 600):
        counts = choose_counts(
            np.full(8, 0.7), np.full(8, 4), num_rows=8, num_tokens=8 + num_prefill_tokens, budget=99, costs=costs
        )
        assert not counts.any()


def test_estimates_that_promise_too_much_choose_fewer_drafts() -> None:
    costs = table({1: 1.0, 101: 26.0})
    rates, most = np.full(8, 0.9), np.full(8, 4)
    numbers = [
        int(choose_counts(rates, most, num_rows=8, num_tokens=8, budget=99, costs=costs, trust=trust).sum())
        for trust in (1.0, 0.95, 0.8)
    ]
    assert numbers[0] >= numbers[1] > numbers[2] == 0


def test_what_a_drafter_lacks_costs_as_long_steps_do() -> None:
    # A token more costs 0.01, and the drafter takes half of a step's time.
    costs = table({1: 1.0, 513: 6.12}, (0.5, 0.5))
    assert costs.catch_up_seconds() == pytest.approx(0.005)


def test_a_scheduler_that_is_slow_to_choose_drafts_chooses_none() -> None:
    tables = [table({1: 1.0, 64: 1.1}, (0.0, 0.0), choosing) for choosing in (0.0, 0.1, 2.0)]
    # At most one more token a step.
    counts = [sum(counts_of([0.5], costs)) for costs in tables]
    assert counts[0] >= counts[1] > counts[2] == 0
    depths = [choose_depth(0.5 ** np.arange(1, 5), 1, 1, costs)[0] for costs in tables]
    assert depths[0] >= depths[1] > depths[2] == 0


def test_what_may_be_an_error_of_the_estimates_repays_no_catching_up() -> None:
    # A draft that is always right makes two tokens of one, and takes the drafter nearly a step.
    for gain in (1.04, 1.5):
        depth, saved = choose_depth(np.ones(1), 1, 1, table({1: 1.0, 11: 1.0}, (2.0 / gain - 1.0,) * 2))
        assert (depth, saved) == (1, pytest.approx(1 - LEAST_GAIN_OF_WORKERS / gain))
