"""One example of each mode: prefills whole or in chunks, deadlines first, swap, drafts, plans ahead of results."""

from collections import deque

import pytest

from scheduler.core.messages import FinishReason, Plan, RejectReason, Result, Speculation
from tests.fakes.model import generate
from tests.support.scheduler.core import CoreDriver, counts_of, make_request
from tests.support.scheduler.costs import FREE


def step(driver: CoreDriver) -> Plan:
    plan = driver.step()
    assert plan is not None
    return plan


def expected(group: int, prompt: list[int], max_tokens: int) -> list[int]:
    request = make_request(group, prompt, max_tokens=max_tokens)
    return generate(request.prompt_token_ids, (), 0, request.stop).token_ids


def test_without_chunked_prefill_prefills_go_first_whole_and_alone():
    driver = CoreDriver(enable_chunked_prefill=False, max_num_batched_tokens=10)
    driver.submit(make_request(1, range(6)))
    driver.submit(make_request(2, range(20, 28)))
    assert counts_of(step(driver)) == [6]
    # The first request decodes only when no more prefills fit.
    plan = step(driver)
    assert (len(plan.decode_rows), counts_of(plan)) == (0, [8])
    assert len(step(driver).decode_rows) == 2
    driver.finish()


def test_without_chunked_prefill_a_prompt_beyond_the_budget_is_refused():
    driver = CoreDriver(enable_chunked_prefill=False, max_num_batched_tokens=10)
    rejection = driver.submit(make_request(1, range(11)))
    assert rejection is not None
    assert rejection.reason is RejectReason.INVALID
    assert "max_num_batched_tokens=10" in rejection.message
    assert driver.submit(make_request(2, range(10))) is None
    driver.finish()


def test_prefills_share_a_step():
    driver = CoreDriver(max_num_batched_tokens=12, max_num_partial_prefills=2, max_long_partial_prefills=2)
    for group in (1, 2, 3):
        driver.submit(make_request(group, range(100 * group, 100 * group + 20)))
    plan = step(driver)
    assert counts_of(plan) == [6, 6]
    driver.finish()


def test_short_prompts_pass_a_long_one_that_has_to_wait_for_another():
    driver = CoreDriver(
        max_num_batched_tokens=12,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=4,
    )
    driver.submit(make_request(1, range(100, 120)))
    driver.submit(make_request(2, range(200, 220)))
    driver.submit(make_request(3, range(300, 303)))
    step(driver)
    assert driver.running() == {(1, 0), (3, 0)}
    driver.finish()


def test_the_earliest_deadline_goes_first():
    driver = CoreDriver(scheduling_policy="deadline", max_num_seqs=1)
    for group, deadline in ((1, None), (2, 9.0), (3, 5.0)):
        driver.submit(make_request(group, [group], max_tokens=1, deadline=deadline))
    ends = []
    while driver.core.has_work:
        step(driver)
        ends += [key for key in driver.ends if key not in ends]
    assert ends == [(3, 0), (2, 0), (1, 0)]


def test_swapped_blocks_come_back_and_nothing_is_computed_again():
    driver = CoreDriver(num_blocks=6, enable_prefix_caching=False, preemption_mode="swap", num_swap_blocks=4)
    prompts = {1: list(range(8)), 2: list(range(20, 28))}
    for group, prompt in prompts.items():
        driver.submit(make_request(group, prompt, max_tokens=9))
    plans: list[Plan] = []
    while driver.core.has_work:
        plans.append(step(driver))
    (event,) = driver.core.take_events()
    assert (event.key, event.swapped) == ((2, 0), True)
    (out,) = [plan for plan in plans if plan.swapped_out]
    (back,) = [plan for plan in plans if plan.swapped_in]
    assert sorted(host for _, host in out.swapped_out) == sorted(host for host, _ in back.swapped_in)
    # All tokens have KV except the last, from which the next one is sampled.
    (row,) = back.new_rows
    assert row.num_computed_tokens == len(row.token_ids) - 1
    for group, prompt in prompts.items():
        assert driver.tokens[group, 0] == expected(group, prompt, 9)


def test_without_room_on_the_host_the_context_is_computed_again():
    driver = CoreDriver(num_blocks=6, enable_prefix_caching=False, preemption_mode="swap", num_swap_blocks=1)
    for group in (1, 2):
        driver.submit(make_request(group, range(20 * group, 20 * group + 8), max_tokens=9))
    driver.finish()
    (event,) = driver.core.take_events()
    assert not event.swapped
    assert driver.core.stats.num_swaps == 0


@pytest.mark.parametrize("is_right", [True, False])
def test_drafts_make_several_tokens_a_step_if_they_are_right(is_right: bool):
    def drafter(true_tokens: list[int]) -> tuple[int, ...]:
        return tuple(true_tokens[:3]) if is_right else tuple((token + 1) % 13 for token in true_tokens[:3])

    driver = CoreDriver(speculation=Speculation(num_speculative_tokens=3, workers_draft=True), drafter=drafter)
    driver.core.set_costs(FREE)
    driver.submit(make_request(1, range(5), max_tokens=13))
    steps = driver.finish()
    assert driver.tokens[1, 0] == expected(1, list(range(5)), 13)
    stats = driver.core.stats
    if is_right:
        # One token in the first step; then the drafters know the sequence; four per step from the third on.
        assert steps == 5
        assert stats.num_accepted_tokens == stats.num_draft_tokens == 8
        assert stats.num_accepted_by_position == (3, 3, 2)
    else:
        assert steps == 13
        assert stats.num_accepted_tokens == 0 < stats.num_draft_tokens


def test_plans_are_made_ahead_and_tokens_past_an_end_are_dropped():
    driver = CoreDriver(max_steps_in_flight=3, eos_token_ids=frozenset(range(13)))
    request = make_request(1, range(5), max_tokens=9)
    driver.submit(request)
    # Any token ends this request; the core learns of it two plans later.
    driver.submit(make_request(2, range(7), stop=type(request.stop)(max_tokens=9)))
    flights: deque[Result] = deque()
    for _ in range(3):
        planned = driver.schedule()
        assert planned is not None
        flights.append(planned[1])
    assert driver.core.schedule(0.0) is None
    assert [len(result.sequences) for result in flights] == [2, 2, 2]
    driver.apply(flights.popleft())
    assert driver.reason(2) is FinishReason.STOP
    assert len(driver.tokens[2, 0]) == 1
    driver.apply(flights.popleft())
    driver.apply(flights.popleft())
    assert len(driver.tokens[2, 0]) == 1
    assert driver.tokens[1, 0] == expected(1, list(range(5)), 9)[:3]
    driver.finish()
