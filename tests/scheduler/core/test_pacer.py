"""Steps are short while something decodes, and as long as they may be while nothing does."""

from typing import Any

import pytest

from scheduler.core.messages import Plan, Speculation, StepCosts
from tests.fakes.model import FakeSampling
from tests.support.scheduler.core import CoreDriver, make_request

TARGET, TOKEN, STEP = 0.1, 0.001, 0.002
TEXT = range(1, 20)


class Clocked:
    """A core whose steps take STEP and TOKEN a token. Keeps the plans and the seconds of each."""

    def __init__(self, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "inter_token_latency_target": TARGET,
            "max_num_batched_tokens": 400,
            "max_model_len": 2000,
            "num_blocks": 2000,
            "max_num_seqs": 64,
            "least_prefill_tokens": 8,
        }
        self.driver = CoreDriver(**(settings | changes))
        self.now = 10.0
        self.steps: list[tuple[Plan, float]] = []

    def step(self) -> Plan:
        planned = self.driver.schedule(self.now)
        assert planned is not None
        plan, result = planned
        seconds = STEP + TOKEN * plan.num_tokens
        self.now += seconds
        self.steps.append((plan, seconds))
        self.driver.apply(result, self.now)
        return plan

    def learn(self) -> None:
        """Short and long prefills, and decodes."""
        for round_ in range(12):
            first = 1000 + 10 * round_
            for group, length in ((first, 40), (first + 1, 300 + round_), (first + 2, 7)):
                self.driver.submit(make_request(group, [group + i for i in range(length)], max_tokens=6))
            while self.driver.core.has_work:
                self.step()
        self.steps.clear()


def prefill_tokens(plan: Plan) -> int:
    return plan.num_prefill_tokens


def test_a_long_prompt_delays_no_token_for_longer_than_the_target():
    clocked = Clocked()
    clocked.learn()
    for group in range(1, 6):
        clocked.driver.submit(make_request(group, [group], max_tokens=200))
    clocked.step()
    clocked.driver.submit(make_request(6, range(1, 1000)))
    for _ in range(15):
        clocked.step()
    with_prefill = [(plan, seconds) for plan, seconds in clocked.steps if plan.chunks and len(plan.decode_rows)]
    assert max(seconds for _, seconds in with_prefill) <= TARGET * 1.05
    # All time but the decodes' goes to the prompt, and more than one step of its size would take has passed.
    assert [prefill_tokens(plan) for plan, _ in with_prefill[:3]] == pytest.approx([93] * 3, abs=5)
    assert sum(prefill_tokens(plan) for plan, _ in with_prefill) == 999
    assert all(plan.predicted_seconds == pytest.approx(seconds, rel=0.05) for plan, seconds in with_prefill)
    stats = clocked.driver.core.stats
    assert stats.num_limited_steps >= len(with_prefill)
    assert stats.measured_seconds == pytest.approx(stats.predicted_seconds, rel=0.2)


def test_a_prompt_alone_gets_the_whole_budget():
    clocked = Clocked()
    clocked.learn()
    clocked.driver.submit(make_request(1, range(1000), max_tokens=1))
    assert [prefill_tokens(clocked.step()) for _ in range(3)] == [400, 400, 200]
    assert not any(plan.predicted_seconds for plan, _ in clocked.steps)


def test_decodes_that_take_too_long_themselves_starve_no_prompt():
    clocked = Clocked(inter_token_latency_target=0.01)
    clocked.learn()
    for group in range(1, 31):
        clocked.driver.submit(make_request(group, [group], max_tokens=500))
    clocked.step()
    clocked.driver.submit(make_request(31, range(64), max_tokens=1))
    plans = [clocked.step() for _ in range(8)]
    assert [prefill_tokens(plan) for plan in plans] == [8] * 8
    assert (31, 0) in clocked.driver.ends
    assert clocked.driver.core.stats.num_late_steps >= 8


def test_without_a_target_no_step_is_cut_and_nothing_is_learned():
    clocked = Clocked(inter_token_latency_target=0.0)
    clocked.driver.submit(make_request(1, [1], max_tokens=50))
    clocked.step()
    clocked.driver.submit(make_request(2, range(900), max_tokens=1))
    assert [prefill_tokens(clocked.step()) for _ in range(3)] == [399, 399, 102]
    assert clocked.driver.core.save().pace is None
    assert clocked.driver.core.stats.num_limited_steps == 0


def test_stages_share_the_time_between_two_tokens():
    """With stages, a sequence gets a token each time that all steps in flight have returned."""
    clocked = Clocked(num_stages=2, max_steps_in_flight=3)
    clocked.learn()
    clocked.driver.submit(make_request(1, [1], max_tokens=50))
    clocked.step()
    clocked.driver.submit(make_request(2, range(900), max_tokens=1))
    assert prefill_tokens(clocked.step()) == pytest.approx(TARGET / 3 / TOKEN - 3, abs=3)


def test_drafts_beside_a_prefill_take_only_the_time_that_is_left():
    speculation = Speculation(num_speculative_tokens=8, drafters=("ngram",))
    clocked = Clocked(speculation=speculation)
    clocked.driver.core.set_costs(StepCosts(num_tokens=(1, 64), seconds=(1.0, 1.0)))
    clocked.learn()
    sampling = FakeSampling(is_predictable=True)
    clocked.driver.submit(make_request(1, TEXT, max_tokens=400, sampling=sampling))
    for _ in range(60):
        clocked.step()
    assert any(plan.drafts for plan, _ in clocked.steps)
    clocked.driver.submit(make_request(2, range(900), max_tokens=1))
    while (2, 0) not in clocked.driver.ends:
        plan = clocked.step()
        assert clocked.steps[-1][1] <= TARGET * 1.05
        assert (plan.num_tokens - len(plan.decode_rows)) > 8
    clocked.steps.clear()
    for _ in range(20):
        clocked.step()
    # Without a prefill nothing bounds them.
    assert any(plan.drafts for plan, _ in clocked.steps)
