"""Refused requests, with reasons that help."""

import pytest

from scheduler.core.messages import ANY_PRIORITY, ChoiceStart, GroupRequest, RejectReason, StopRules
from tests.support.scheduler.core import CoreDriver, make_request


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (make_request(1, []), ["prompt is empty", "at least one token"]),
        (make_request(1, range(200)), ["200 tokens", "max_model_len=200", "at most 199"]),
        (make_request(1, range(190), max_tokens=11), ["max_tokens=11", "max_model_len=200", "at most 10"]),
        (make_request(1, [1], max_tokens=2**31), ["max_tokens=2147483648", "at most 199"]),
        (make_request(1, [1], max_tokens=0), ["max_tokens=0", "at least 1"]),
        (make_request(1, [1], stop=StopRules(max_tokens=3, min_tokens=4)), ["min_tokens=4", "0 to max_tokens"]),
        (make_request(1, [1], choices=[]), ["choices=[]", "at least one"]),
        (make_request(1, [1], choices=[ChoiceStart(choice=2)] * 2), ["choices=[2, 2]", "each once"]),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_what_would_work(request_: GroupRequest, said: list[str]):
    driver = CoreDriver()
    rejection = driver.submit(request_)
    assert rejection is not None
    assert rejection.reason is RejectReason.INVALID
    for words in said:
        assert words in rejection.message
    assert not driver.core.has_work


def test_what_never_fits_into_the_blocks_is_refused_and_what_just_fits_runs():
    """The last token is sampled but not computed, so a request may have one token more than the blocks hold."""
    driver = CoreDriver(num_blocks=3)
    rejection = driver.submit(make_request(1, range(6), max_tokens=8))
    assert rejection is not None
    assert rejection.reason is RejectReason.INVALID
    for words in ("max_tokens=8", "3 blocks of 4 tokens", "at most 13", "kv_cache_memory"):
        assert words in rejection.message
    assert driver.submit(make_request(2, range(6), max_tokens=7)) is None
    driver.finish()
    assert len(driver.tokens[2, 0]) == 7


def test_waiting_requests_are_bounded_and_running_ones_do_not_count():
    driver = CoreDriver(max_queued_requests=2, max_num_seqs=1)
    assert driver.submit(make_request(1, [1])) is None
    driver.step()
    assert driver.submit(make_request(2, [1])) is None
    assert driver.submit(make_request(3, [1], choices=3)) is None
    rejection = driver.submit(make_request(4, [1]))
    assert rejection is not None
    assert rejection.reason is RejectReason.QUEUE_FULL
    assert "max_queued_requests=2" in rejection.message
    driver.cancel(2)
    assert driver.submit(make_request(5, [1])) is None
    driver.finish()


def test_waiting_prompt_tokens_are_bounded():
    driver = CoreDriver(max_queued_tokens=20)
    assert driver.submit(make_request(1, range(12), choices=2)) is None
    assert driver.core.load.num_queued_tokens == 12
    rejection = driver.submit(make_request(2, range(9)))
    assert rejection is not None
    assert rejection.reason is RejectReason.QUEUE_FULL
    assert "12 prompt tokens wait" in rejection.message
    driver.step()
    assert driver.core.load.num_queued_tokens == 0
    assert driver.submit(make_request(3, range(9))) is None
    alone = driver.submit(make_request(4, range(21)))
    assert alone is not None
    assert "21 tokens, more than max_queued_tokens=20" in alone.message
    driver.finish()


def test_a_preempted_request_does_not_count_as_queued():
    """It was admitted before: if it counted again, it would keep new requests out."""
    driver = CoreDriver(max_queued_requests=1)
    driver.submit(make_request(1, range(8)))
    driver.step()
    driver.lose_workers()
    assert driver.core.load.num_waiting == 1
    assert driver.core.load.num_queued_tokens == 0
    assert driver.submit(make_request(2, [1])) is None
    driver.finish()


def test_a_more_urgent_request_takes_the_place_of_the_last_who_waits():
    """Only under `priority`: the lowest priority is displaced, among equals the latest. Running requests stay."""
    driver = CoreDriver(max_queued_requests=3, max_num_seqs=1, scheduling_policy="priority")
    driver.submit(make_request(1, [1], priority=9))
    driver.step()
    for group, priority in ((2, 5), (3, 7), (4, 7)):
        assert driver.submit(make_request(group, [group], priority=priority)) is None
    assert driver.core.load.refused_priority == 7
    rejection = driver.submit(make_request(5, [5], priority=7))
    assert rejection is not None
    assert rejection.reason is RejectReason.QUEUE_FULL
    assert driver.core.take_displaced() == []
    for group, displaced in ((6, 4), (7, 3), (8, 2)):
        assert driver.submit(make_request(group, [group], priority=1)) is None
        assert driver.core.take_displaced() == [displaced]
    assert driver.core.load.refused_priority == 1
    assert driver.submit(make_request(9, [9], priority=1)) is not None
    driver.finish()
    assert [end for end, _ in driver.ends] == [1, 6, 7, 8]
    (timeline,) = driver.core.explain("request-4")
    assert timeline.entries[-1].reason == "cancelled: displaced by a higher priority"


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_nobody_is_displaced_where_priorities_mean_nothing(policy: str):
    driver = CoreDriver(max_queued_requests=1, scheduling_policy=policy)
    driver.submit(make_request(1, [1], priority=5))
    assert driver.submit(make_request(2, [2], priority=0)) is not None
    assert driver.core.load.refused_priority == ANY_PRIORITY
    driver.finish()
    assert driver.core.load.refused_priority is None


def test_as_many_make_way_as_it_takes_or_none_does():
    driver = CoreDriver(max_queued_tokens=20, scheduling_policy="priority")
    for group, num_tokens in ((1, 10), (2, 4), (3, 6)):
        driver.submit(make_request(group, range(num_tokens), priority=group))
    # Without groups 3 and 2 there would be room for 10 tokens.
    assert driver.submit(make_request(4, range(11), priority=1)) is not None
    assert driver.core.take_displaced() == []
    assert driver.core.load.num_queued_tokens == 20
    assert driver.submit(make_request(5, range(10), priority=1)) is None
    assert driver.core.take_displaced() == [3, 2]
    driver.finish()


def test_a_request_that_has_begun_elsewhere_keeps_its_place():
    """Its client already has tokens: a router moved the request here, or the client resumed it."""
    driver = CoreDriver(max_queued_requests=2, scheduling_policy="priority")
    driver.submit(make_request(1, [1], priority=9, choices=[ChoiceStart(choice=0, output_token_ids=(5,))]))
    driver.submit(make_request(2, [1], priority=3))
    assert driver.submit(make_request(3, [1], priority=1)) is None
    assert driver.core.take_displaced() == [2]
    assert driver.submit(make_request(4, [1], priority=0)) is None
    assert driver.core.take_displaced() == [3]
    driver.cancel(4)
    driver.submit(make_request(5, [1], choices=[ChoiceStart(choice=0, output_token_ids=(5,))]))
    assert driver.core.load.refused_priority == ANY_PRIORITY
    driver.finish()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_what_waits_past_its_deadline_is_dropped_and_never_computed(policy: str):
    driver = CoreDriver(max_num_seqs=1, scheduling_policy=policy)
    driver.submit(make_request(1, [1], priority=0, deadline=100.0))
    driver.step(now=0.0)
    driver.submit(make_request(2, range(10), priority=1, deadline=5.0))
    driver.submit(make_request(3, range(10), priority=2, deadline=200.0))
    driver.step(now=4.9)
    assert driver.expire(now=5.0) == [(2, 0)]
    assert driver.core.load.num_queued_tokens == 10
    driver.finish()
    assert driver.tokens[2, 0] == []
    assert driver.core.stats.num_prompt_tokens == 11


def test_a_prompt_counts_as_to_be_computed_until_its_steps_have_returned():
    """If a prefill in flight did not count, a router would send the next prompt behind it."""
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.submit(make_request(1, range(14)))
    seen = []
    for _ in range(3):
        step = driver.schedule()
        assert step is not None
        seen.append(driver.core.load.num_prefill_tokens)
        driver.apply(step[1])
    assert seen == [14, 6, 0]
    assert driver.core.load.num_queued_tokens == 0
