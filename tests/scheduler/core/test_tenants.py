"""Tenants share the queue and the workers by weight, and under `priority` no request waits forever."""

from typing import Any

import pytest

from scheduler.core.messages import ANY_PRIORITY, RejectReason
from tests.support.scheduler.core import CoreDriver, make_request


def _submit(driver: CoreDriver, tenant: str, groups: range, *, weight: float = 1.0, **fields: Any) -> None:
    for group in groups:
        request = make_request(group, [group % 90] * 8, max_tokens=8, tenant=tenant, weight=weight, **fields)
        assert driver.submit(request) is None


def _order(driver: CoreDriver) -> list[int]:
    """Runs until nothing is left. Returns the groups in the order in which they ended."""
    driver.finish()
    return [group for group, _ in driver.ends]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_a_tenant_does_not_wait_for_all_that_another_has_queued(policy: str) -> None:
    driver = CoreDriver(max_num_seqs=1, scheduling_policy=policy)
    _submit(driver, "large", range(1, 21))
    for _ in range(20):
        driver.step()
    _submit(driver, "small", range(21, 24))
    ended = _order(driver)
    # The large one has been served for a while, but time in which it was alone does not count. Before: 20, 21, 22.
    assert [ended.index(group) for group in (21, 22, 23)] == [3, 5, 7]


def test_weights_are_shares_of_the_tokens_and_long_outputs_count() -> None:
    driver = CoreDriver(max_num_seqs=1)
    _submit(driver, "three", range(1, 31), weight=3.0)
    _submit(driver, "one", range(31, 61))
    ended = _order(driver)[:20]
    assert sum(group <= 30 for group in ended) == 15
    # As many tokens, in requests four times as long.
    driver = CoreDriver(max_num_seqs=1)
    for group in range(1, 11):
        assert driver.submit(make_request(group, [1] * 8, max_tokens=40, tenant="long")) is None
    _submit(driver, "short", range(11, 51))
    ended = _order(driver)
    num_long = sum(group <= 10 for group in ended[:25])
    assert 4 <= num_long <= 6


def test_a_priority_goes_before_any_share() -> None:
    driver = CoreDriver(max_num_seqs=1, scheduling_policy="priority")
    _submit(driver, "large", range(1, 6))
    driver.step()
    _submit(driver, "small", range(6, 8), priority=1)
    assert _order(driver) == [1, 2, 3, 4, 5, 6, 7]


def test_one_tenant_does_not_fill_the_queue() -> None:
    driver = CoreDriver(max_num_seqs=1, max_queued_requests=10)
    _submit(driver, "small", range(1, 2))
    driver.step()
    _submit(driver, "large", range(2, 7))
    rejection = driver.submit(make_request(7, [1], tenant="large"))
    assert rejection is not None
    assert rejection.reason is RejectReason.QUEUE_FULL
    assert "5 requests with 40 prompt tokens of tenant large wait already" in rejection.message
    load = driver.core.load
    assert (load.refused_priority, load.refused_tenants) == (None, (("large", ANY_PRIORITY),))
    # Before: the queue was full for all.
    _submit(driver, "small", range(8, 10))
    driver.finish()
    assert driver.core.load.refused_tenants == ()


def test_without_tenants_one_caller_may_fill_the_queue() -> None:
    driver = CoreDriver(max_num_seqs=1, max_queued_requests=10)
    _submit(driver, "", range(1, 2))
    driver.step()
    _submit(driver, "", range(2, 12))
    assert driver.submit(make_request(12, [1])) is not None
    driver.finish()


def test_urgent_requests_displace_those_of_their_own_tenant() -> None:
    driver = CoreDriver(max_num_seqs=1, max_queued_requests=10, scheduling_policy="priority")
    _submit(driver, "small", range(1, 4), priority=9)
    driver.step()
    _submit(driver, "large", range(4, 8), priority=5)
    assert driver.core.load.refused_tenants == (("large", 5),)
    assert driver.submit(make_request(8, [1], tenant="large", priority=4)) is None
    assert driver.core.take_displaced() == [7]
    driver.finish()


@pytest.mark.parametrize(("aging", "place"), [(0.0, 30), (2.0, 5)])
def test_under_priority_waiting_counts(aging: float, place: int) -> None:
    """One request of priority 3 comes at second 1, and one of priority 0 each second. It goes before those that come
    from second 6 on: 3 times `aging`, in whole multiples of `aging`."""
    driver = CoreDriver(max_num_seqs=1, scheduling_policy="priority", priority_aging=aging)
    now = 0.0
    for group in range(1, 31):
        now += 1.0
        assert driver.submit(make_request(group, [1] * 4, max_tokens=2, priority=0), now) is None
        if group == 1:
            assert driver.submit(make_request(100, [1] * 4, max_tokens=2, priority=3), now) is None
        while (group, 0) not in driver.ends and (100, 0) not in list(driver.ends)[-1:]:
            driver.step(now)
    driver.finish()
    order = [group for group, _ in driver.ends]
    assert order.index(100) == place
    assert [group for group in order if group != 100] == list(range(1, 31))
