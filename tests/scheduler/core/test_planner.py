"""Which sequences run in a step, and with how many tokens."""

from scheduler.core.messages import GroupRequest, Plan
from tests.support.scheduler.core import CoreDriver, make_request


def counts(driver: CoreDriver, plan: Plan | None) -> list[tuple[int, int]]:
    """(group, tokens) of a plan in batch order. Must be called before the plan's result is applied."""
    assert plan is not None
    keys = {row: driver.core.key_of(state.sequence) for row, state in driver.worker.rows.items()}
    return [(key[0], count) for row, count in plan.batch if (key := keys[row]) is not None]


def step_counts(driver: CoreDriver) -> list[tuple[int, int]]:
    step = driver.schedule()
    assert step is not None
    plan, result = step
    found = counts(driver, plan)
    driver.apply(result)
    return found


def test_decodes_come_first_and_the_last_prefill_is_chunked():
    driver = CoreDriver(max_num_batched_tokens=10)
    driver.submit(make_request(1, [1, 2]))
    assert step_counts(driver) == [(1, 2)]
    driver.submit(make_request(2, range(20, 24)))
    driver.submit(make_request(3, range(40, 60)))
    assert step_counts(driver) == [(1, 1), (2, 4), (3, 5)]
    assert step_counts(driver) == [(1, 1), (2, 1), (3, 8)]
    driver.submit(make_request(4, range(60, 70)))
    # A prefill that has begun continues before another one begins.
    assert step_counts(driver) == [(1, 1), (2, 1), (3, 7), (4, 1)]
    driver.finish()


def test_a_row_samples_only_when_all_its_tokens_are_computed():
    driver = CoreDriver(max_num_batched_tokens=8)
    driver.submit(make_request(1, range(17), max_tokens=1))
    for expected in (8, 8, 1):
        assert (1, 0) not in driver.ends
        assert step_counts(driver) == [(1, expected)]
    assert len(driver.tokens[1, 0]) == 1
    assert driver.reason(1) is not None


def test_rows_bound_the_sequences_and_are_used_again_once_freed():
    driver = CoreDriver(max_num_seqs=2)
    for group in range(1, 6):
        driver.submit(make_request(group, [group], max_tokens=2))
    assert step_counts(driver) == [(1, 1), (2, 1)]
    assert step_counts(driver) == [(1, 1), (2, 1)]
    step = driver.schedule()
    assert step is not None
    # The same plan frees and refills the rows: no step is lost.
    assert sorted(step[0].freed_rows) == [0, 1]
    assert {row.row for row in step[0].new_rows} == {0, 1}
    driver.apply(step[1])
    driver.finish()


def test_nobody_overtakes_the_first_who_waits():
    driver = CoreDriver(num_blocks=10)
    driver.submit(make_request(1, range(20), max_tokens=12))
    driver.step()
    driver.submit(make_request(2, range(50, 78)))
    driver.submit(make_request(3, [1]))
    while (1, 0) not in driver.ends:
        step_counts(driver)
        assert driver.core.load.num_waiting == 2
    driver.finish()


def first_runs(requests: list[GroupRequest], policy: str) -> list[int]:
    driver = CoreDriver(scheduling_policy=policy, max_num_seqs=1)
    for request in requests:
        driver.submit(request)
    order: list[int] = []
    while driver.core.has_work:
        order += [group for group, _ in step_counts(driver) if group not in order]
    return order


def test_policies_order_those_who_wait():
    priorities = {1: 1, 2: 0, 3: -5, 4: 0}
    requests = [make_request(group, [group], priority=priority) for group, priority in priorities.items()]
    assert first_runs(requests, "fcfs") == [1, 2, 3, 4]
    assert first_runs(requests, "priority") == [3, 2, 4, 1]


def test_a_budget_below_the_decodes_still_ends_them_all():
    driver = CoreDriver(max_num_batched_tokens=2)
    for group in range(1, 5):
        driver.submit(make_request(group, [group]))
    assert driver.finish() <= 16
    assert all(len(tokens) == 4 for tokens in driver.tokens.values())


def test_nothing_to_run_is_no_plan():
    driver = CoreDriver()
    assert driver.core.schedule(0.0) is None
    driver.submit(make_request(1, [1], max_tokens=1))
    driver.step()
    # A row has to be freed, but that alone makes no step.
    assert driver.core.schedule(0.0) is None
    driver.submit(make_request(2, [1], max_tokens=1))
    plan = driver.step()
    assert plan is not None
    assert plan.freed_rows == [0]


def test_steady_decodes_are_told_as_differences():
    driver = CoreDriver()
    driver.submit(make_request(1, range(5), max_tokens=8))
    driver.step()
    plans = [driver.step() for _ in range(5)]
    assert [len(plan.grown_rows) for plan in plans if plan is not None] == [0, 0, 0, 1, 0]
    for plan in plans:
        assert plan is not None
        assert plan.decode_rows.tolist() == [0]
        assert not plan.new_rows
        assert not plan.chunks
    driver.finish()
