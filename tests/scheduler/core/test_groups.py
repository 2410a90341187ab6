"""Choices of one request share its prompt, and none waits for a choice that has gone."""

import dataclasses

import pytest

from scheduler.core.messages import ChoiceStart, FinishReason
from tests.fakes.model import generate
from tests.support.scheduler.core import CoreDriver, counts_of, make_request


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompts_full_blocks(caching: bool):
    driver = CoreDriver(enable_prefix_caching=caching)
    driver.submit(make_request(1, range(10), choices=3))
    plan = driver.step()
    assert plan is not None
    # The prompt is computed once; the other choices compute only the tokens after its full blocks, in the same step.
    assert counts_of(plan) == [10, 2, 2]
    tables = [row.block_ids for row in plan.new_rows]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    driver.finish()
    outputs = [tuple(driver.tokens[1, choice]) for choice in range(3)]
    assert len(set(outputs)) > 1
    for choice, output in enumerate(outputs):
        stop = make_request(1, [1]).stop
        assert list(output) == generate(tuple(range(10)), (), choice, stop).token_ids


def test_without_prefix_caching_nothing_is_kept_and_requests_do_not_share():
    driver = CoreDriver(enable_prefix_caching=False)
    for group in (1, 2):
        driver.submit(make_request(group, range(10), choices=2))
    plan = driver.step()
    assert plan is not None
    assert counts_of(plan) == [10, 2, 10, 2]
    driver.finish()
    driver.submit(make_request(3, range(10), choices=2))
    plan = driver.step()
    assert plan is not None
    assert counts_of(plan) == [10, 2]
    driver.finish()


def test_choices_wait_for_the_prompt_and_block_nobody():
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.submit(make_request(1, range(20), choices=2))
    driver.submit(make_request(2, [1]))
    counts = []
    while driver.core.has_work:
        plan = driver.step()
        assert plan is not None
        counts.append(counts_of(plan))
    # 20 prompt tokens once; in the third step the second choice hits all its blocks but the last.
    assert counts[:3] == [[8], [8], [4, 4]]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_when_the_first_choice_is_cancelled_another_computes_the_prompt(steps: int, caching: bool):
    driver = CoreDriver(max_num_batched_tokens=8, enable_prefix_caching=caching)
    driver.submit(make_request(1, range(20), choices=3))
    for _ in range(steps):
        driver.step()
    assert driver.cancel(1, 0) == [(1, 0)]
    driver.finish()
    assert (1, 0) not in driver.ends
    assert [driver.reason(1, choice) for choice in (1, 2)] == [FinishReason.LENGTH] * 2


def test_when_the_first_choice_fails_another_computes_the_prompt():
    """The failed choice's KV may be the cause, so no other choice reads it."""
    driver = CoreDriver(max_num_seqs=1)
    driver.submit(make_request(1, range(20), choices=2))
    step = driver.schedule()
    assert step is not None
    plan, result = step
    driver.apply(dataclasses.replace(result, failed=frozenset({plan.new_rows[0].sequence})))
    assert driver.reason(1, 0) is FinishReason.ERROR
    plan = driver.step()
    assert plan is not None
    assert counts_of(plan) == [20]
    driver.finish()
    assert driver.reason(1, 1) is FinishReason.LENGTH


def test_choices_cancelled_while_they_wait_for_the_prompt_are_gone():
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.submit(make_request(1, range(20), choices=3))
    driver.step()
    assert driver.cancel(1, 1, 2, 3) == [(1, 1), (1, 2)]
    driver.finish()
    assert set(driver.ends) == {(1, 0)}


def test_when_the_first_choice_is_preempted_the_group_still_ends():
    driver = CoreDriver(num_blocks=10, max_num_batched_tokens=8, max_model_len=41)
    driver.submit(make_request(1, range(40, 52), max_tokens=20))
    driver.step()
    driver.step()
    driver.submit(make_request(2, range(27), choices=2, max_tokens=10))
    while not driver.core.stats.num_preemptions:
        assert driver.step() is not None
    assert driver.core.take_events()[0].key == (2, 0)
    driver.finish()
    assert [driver.reason(2, choice) for choice in (0, 1)] == [FinishReason.LENGTH] * 2


def test_resumed_choices_go_on_where_they_were():
    driver = CoreDriver()
    request = make_request(1, range(10), choices=2, max_tokens=8)
    driver.submit(request)
    driver.finish()
    full = [driver.tokens[1, choice] for choice in (0, 1)]
    starts = [ChoiceStart(choice=i, output_token_ids=tuple(full[i][: 3 + i])) for i in (0, 1)]
    driver.submit(make_request(2, range(10), choices=starts, max_tokens=8))
    driver.finish()
    assert [driver.tokens[2, choice] for choice in (0, 1)] == full
