"""The simulator against cases small enough to compute by hand, and against properties of every case."""

import numpy as np
import pytest

from octavo.lab.errors import PlanError
from octavo.plan.simulate import simulate
from octavo.plan.workload import parse_lengths, synthesize
from scheduler.core.messages import Speculation
from tests.support.scheduler.plan import LinearCost, run, settings, workload


def test_one_request_takes_one_step_a_token() -> None:
    result = run(workload((0.0, 10, 3)), LinearCost(step=2.0))
    assert result.ttft == pytest.approx([2.0])
    assert result.gaps == pytest.approx([2.0, 2.0])
    assert result.e2e == pytest.approx([6.0])
    assert (result.duration, result.num_steps) == (6.0, 3)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (1, 10, 3)
    assert result.output_tokens_per_second == 0.5
    assert result.idle == 0.0


def test_the_parts_of_all_steps_add_up() -> None:
    result = run(workload((0.0, 10, 3)), LinearCost(step=1.0, token=0.5))
    # 10 prompt tokens, then 2 decodes.
    assert result.part_seconds == {"steps": pytest.approx(3.0), "tokens": pytest.approx(6.0)}


def test_a_prompt_above_the_budget_takes_several_steps() -> None:
    result = run(workload((0.0, 100, 1)), max_num_batched_tokens=40)
    assert result.ttft == pytest.approx([3.0])


def test_one_that_comes_during_a_step_waits_for_its_end() -> None:
    result = run(workload((0.0, 8, 4), (0.5, 8, 1)))
    # It arrives at 0.5, enters the step that begins at 1, and has its token at 2.
    assert result.ttft == pytest.approx([1.0, 1.5])


def test_idle_time_between_requests_costs_no_step() -> None:
    result = run(workload((0.0, 8, 2), (10.0, 8, 2)))
    assert result.num_steps == 4
    assert result.duration == pytest.approx(12.0)
    assert result.idle == pytest.approx(8 / 12)


def test_a_closed_loop_lets_one_in_for_each_that_ends() -> None:
    result = run(workload(*[(0.0, 8, 2)] * 4, concurrency=1))
    # Each request's time counts from its admission.
    assert result.e2e == pytest.approx([2.0] * 4)
    assert result.duration == pytest.approx(8.0)


def test_each_goes_to_the_replica_with_the_fewest_under_way() -> None:
    one = run(workload(*[(0.0, 8, 4)] * 2), max_num_seqs=1)
    two = run(workload(*[(0.0, 8, 4)] * 2), max_num_seqs=1, num_replicas=2)
    assert one.duration == pytest.approx(8.0)
    assert two.duration == pytest.approx(4.0)
    assert two.num_steps == 8


def test_the_schedulers_time_is_hidden_by_a_step_in_flight() -> None:
    cost = LinearCost(step=1.0, host_seconds=0.25)
    assert run(workload((0.0, 8, 4)), cost).duration == pytest.approx(5.0)
    assert run(workload((0.0, 8, 4)), cost, max_steps_in_flight=2).duration == pytest.approx(4.25)


def test_stages_work_on_different_steps_at_once() -> None:
    requests = workload((0.0, 8, 3), (0.0, 8, 3))
    options = {"max_num_batched_tokens": 8, "num_stages": 2, "max_steps_in_flight": 2}
    result = run(requests, LinearCost(step=1.0, num_stages=2), **options)
    # Each prompt fills a step. The requests follow each other through both stages: 3 passes of 2 s each, and 1 s for
    # the second one's lag.
    assert result.ttft == pytest.approx([2.0, 3.0])
    assert result.duration == pytest.approx(7.0)
    assert result.idle == pytest.approx(1 / 7)


def test_a_shared_prefix_is_computed_once() -> None:
    shared = run(workload((0.0, 64, 1), (5.0, 64, 1), prefix_lens=[48, 48]), LinearCost(step=0.0, token=1.0))
    assert shared.num_prefix_hits == 48
    assert shared.part_seconds["tokens"] == pytest.approx(64 + 16)


def test_short_memory_preempts_and_all_end() -> None:
    result = run(workload(*[(0.0, 16, 60)] * 8), num_blocks=24, max_model_len=80)
    assert result.num_requests == 8
    assert result.num_output_tokens == 480
    assert result.num_preemptions > 0
    assert result.kv_usage_peak > 0.9
    assert 0 < result.kv_usage_mean <= result.kv_usage_peak <= 1


def test_a_full_queue_refuses_and_says_how_many() -> None:
    result = run(workload(*[(0.0, 8, 2)] * 5), max_queued_requests=3)
    assert (result.num_requests, result.num_refused) == (3, 2)


def test_one_that_can_never_be_served_is_an_error() -> None:
    with pytest.raises(PlanError, match="request 2 of the workload, 600 tokens in and 4 out, is refused"):
        run(workload((0.0, 8, 4), (0.0, 600, 4)))


def random_workload(seed: int = 3, rate: float = 2.0):
    return synthesize(
        num_requests=60,
        rate=rate,
        concurrency=0,
        prompt_len=parse_lengths("uniform:1:200", "--prompt-len"),
        output_len=parse_lengths("lognormal:20:0.8", "--output-len"),
        max_model_len=512,
        seed=seed,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 70},
        {"num_blocks": 70, "preemption_mode": "swap", "num_swap_blocks": 200},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"max_steps_in_flight": 3, "num_blocks": 80},
        {"num_replicas": 3, "enable_prefix_caching": False},
    ],
)
def test_nothing_is_lost_and_nothing_made_up(options: dict) -> None:
    requests = random_workload()
    result = run(requests, LinearCost(step=0.05, token=0.001), **options)
    assert result.num_requests == 60
    assert result.num_output_tokens == requests.output_lens.sum()
    assert len(result.gaps) == requests.output_lens.sum() - 60
    assert (result.ttft > 0).all()
    assert (result.gaps > 0).all()
    assert (result.e2e >= result.ttft).all()
    # e2e is ttft plus the gaps.
    assert result.e2e.sum() == pytest.approx(result.ttft.sum() + result.gaps.sum())


def test_equal_inputs_give_equal_results() -> None:
    cost = LinearCost(step=0.05, token=0.001)
    one, other = (run(random_workload(), cost, num_blocks=80, num_replicas=2) for _ in range(2))
    for name in ("ttft", "e2e", "gaps"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.num_steps == other.num_steps


def test_dearer_steps_fewer_rows_and_fewer_replicas_are_not_faster() -> None:
    requests = random_workload(rate=float("inf"))

    def duration(cost: LinearCost | None = None, **options) -> float:
        return run(requests, cost or LinearCost(step=0.05, token=0.001), **options).duration

    base = duration()
    assert duration(LinearCost(step=0.1, token=0.001)) > base
    assert duration(max_num_seqs=4) > base
    assert duration(num_blocks=70) >= base
    assert duration(num_replicas=2) < base


def test_a_target_of_latency_bounds_the_gaps_and_costs_the_first_tokens() -> None:
    requests, cost = random_workload(rate=4.0), LinearCost(step=0.01, token=0.002)
    free = run(requests, cost, max_num_batched_tokens=512)
    bounded = run(requests, cost, max_num_batched_tokens=512, inter_token_latency_target=0.1)
    assert np.percentile(free.gaps, 99) > 0.2
    assert np.percentile(bounded.gaps, 99) < 0.11
    assert np.median(bounded.ttft) > np.median(free.ttft)
    assert bounded.num_output_tokens == free.num_output_tokens
    assert bounded.output_tokens_per_second > 0.9 * free.output_tokens_per_second


def test_drafts_that_are_all_right_make_fewer_steps_and_wrong_ones_are_given_up() -> None:
    requests, cost = workload((0.0, 8, 200)), LinearCost(step=1.0, token=0.01)
    speculation = Speculation(num_speculative_tokens=4, workers_draft=True)
    core, plain = settings(speculation=speculation), run(requests, cost)
    right = simulate(core, cost, requests, acceptance=1.0)
    half = simulate(core, cost, requests, acceptance=0.5)
    wrong = simulate(core, cost, requests, acceptance=0.0)
    assert plain.num_steps == 200
    # Five tokens a step, once the drafter is known to be good.
    assert 40 <= right.num_steps <= 60
    assert right.num_accepted_tokens == right.num_draft_tokens
    assert right.num_steps < half.num_steps < 140
    assert wrong.num_accepted_tokens == 0
    assert wrong.duration < 1.1 * plain.duration
    assert {each.num_output_tokens for each in (plain, right, half, wrong)} == {200}
