"""Cancels, deadlines and lost workers, with and without a plan in flight."""

import dataclasses
from collections.abc import Callable

import pytest

from scheduler.core.messages import FinishReason
from tests.fakes.model import generate
from tests.support.scheduler.core import CoreDriver, make_request


def waiting(driver: CoreDriver) -> None:
    driver.submit(make_request(9, range(4), max_tokens=30))
    driver.step()
    driver.submit(make_request(1, range(10, 18)))
    assert driver.running() == {(9, 0)}


def running(driver: CoreDriver) -> None:
    driver.submit(make_request(1, range(10, 18), choices=2))
    driver.step()


def preempted(driver: CoreDriver) -> None:
    driver.submit(make_request(1, range(10, 18)))
    driver.step()
    driver.lose_workers()


@pytest.mark.parametrize("reach", [waiting, running, preempted])
def test_a_cancel_frees_everything_at_once_wherever_it_finds_a_sequence(reach: Callable[[CoreDriver], None]):
    driver = CoreDriver(max_num_seqs=1 if reach is waiting else 8)
    reach(driver)
    keys = {key for key in driver.tokens if key[0] == 1}
    assert set(driver.cancel(1)) == keys
    driver.core.check_integrity()
    assert driver.cancel(1) == []
    driver.finish()
    assert not keys & driver.ends.keys()


def test_a_cancel_during_the_step_leaves_its_result_unheard():
    """A late result for a cancelled request must not affect other requests."""
    driver = CoreDriver(num_blocks=4, max_num_seqs=2)
    driver.submit(make_request(1, range(12)))
    step = driver.schedule()
    assert step is not None
    plan, result = step
    assert driver.cancel(1) == [(1, 0)]
    assert driver.core.load.num_free_blocks == 4
    driver.submit(make_request(2, range(20, 32)))
    assert not len(driver.apply(result).token_ids)
    freed_row = plan.new_rows[0].row
    plan = driver.step()
    assert plan is not None
    assert plan.freed_rows == [freed_row]
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH


def test_deadlines_cancel_whole_groups_in_time():
    driver = CoreDriver(max_num_seqs=2)
    driver.submit(make_request(1, [1], choices=2, max_tokens=50, deadline=5.0))
    driver.submit(make_request(2, [2], deadline=7.0))
    driver.submit(make_request(3, [3], deadline=6.0))
    driver.submit(make_request(4, [4]))
    driver.step()
    assert driver.expire(4.9) == []
    assert driver.expire(5.0) == [(1, 0), (1, 1)]
    assert driver.expire(5.5) == []
    assert driver.expire(100.0) == [(3, 0), (2, 0)]
    assert driver.expire(200.0) == []
    driver.finish()
    assert set(driver.ends) == {(4, 0)}


def test_a_deadline_ends_with_its_group():
    driver = CoreDriver()
    driver.submit(make_request(1, [1], deadline=5.0))
    driver.finish()
    driver.submit(make_request(1, [1]))
    assert driver.expire(6.0) == []
    driver.finish()


def test_a_deadline_that_has_passed_at_submission_is_due():
    driver = CoreDriver()
    assert driver.submit(make_request(1, [1], deadline=1.0), now=2.0) is None
    assert driver.expire(2.0) == [(1, 0)]


def test_lost_workers_cost_no_stream_a_token():
    driver = CoreDriver(max_num_batched_tokens=16)
    requests = [make_request(group, range(group * 5), max_tokens=6, choices=2) for group in (1, 2, 3)]
    for request in requests:
        driver.submit(request)
    for _ in range(5):
        driver.step()
    step = driver.schedule()
    assert step is not None
    numbers = {row.sequence for row in driver.worker.rows.values()}
    driver.lose_workers()
    assert driver.core.load.num_free_blocks == driver.core.load.num_blocks
    # The old plan is void, whether or not the next one is in flight, and so are its rows and blocks: nothing has to be
    # freed, nothing is cached.
    stale = dataclasses.replace(step[1], step=step[1].step + 1)
    assert not len(driver.apply(step[1]).token_ids)
    next_step = driver.schedule()
    assert next_step is not None
    assert not len(driver.apply(stale).token_ids)
    plan, result = next_step
    assert plan.step == 1
    assert plan.freed_rows == []
    assert plan.new_rows[0].num_computed_tokens == 0
    assert not numbers & {row.sequence for row in plan.new_rows}
    assert len(driver.apply(result).token_ids)
    driver.finish()
    for request in requests:
        for start in request.choices:
            expected = generate(request.prompt_token_ids, (), start.choice, request.stop)
            assert driver.tokens[request.group, start.choice] == expected.token_ids
    assert driver.core.stats.num_preemptions == 0
    assert driver.core.take_events() == []


def test_what_no_longer_fits_after_a_loss_ends_with_an_error():
    driver = CoreDriver(num_blocks=20)
    driver.submit(make_request(1, range(40)))
    driver.submit(make_request(2, range(8)))
    driver.step()
    driver.submit(make_request(3, range(40), choices=2))
    driver.lose_workers(num_blocks=5)
    assert {key for key, end in driver.ends.items() if end.reason is FinishReason.ERROR} == {
        (1, 0),
        (3, 0),
        (3, 1),
    }
    assert "11 KV blocks" in driver.ends[1, 0].message
    assert driver.core.load.num_blocks == 5
    driver.finish()
    assert driver.reason(2) is FinishReason.LENGTH
    rejection = driver.submit(make_request(4, range(40)))
    assert rejection is not None
    assert "5 blocks" in rejection.message


def test_keys_are_known_while_a_sequence_runs():
    driver = CoreDriver()
    driver.submit(make_request(1, [1], max_tokens=1))
    step = driver.schedule()
    assert step is not None
    plan, result = step
    number = plan.new_rows[0].sequence
    assert driver.core.key_of(number) == (1, 0)
    driver.apply(result)
    assert driver.core.key_of(number) is None
