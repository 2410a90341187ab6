"""When blocks run out: which request is preempted, when it comes back, and that all requests end."""

import pytest

from scheduler.core.messages import ChoiceStart, Plan
from tests.fakes.model import generate
from tests.support.scheduler.core import CoreDriver, make_request


def test_the_latest_gives_way_and_comes_back_whole():
    driver = CoreDriver(num_blocks=6, max_num_batched_tokens=8, enable_prefix_caching=False)
    driver.submit(make_request(1, range(8), max_tokens=9))
    driver.submit(make_request(2, range(20, 28), max_tokens=9))
    while not (events := driver.core.take_events()):
        assert driver.step() is not None
    assert [(event.key, event.request_id, event.num_preemptions) for event in events] == [((2, 0), "request-2", 1)]
    assert driver.core.take_events() == []
    num_tokens = 8 + len(driver.tokens[2, 0])
    returned: Plan | None = None
    while returned is None:
        plan = driver.step()
        assert plan is not None
        returned = plan if plan.new_rows else None
    (row,) = returned.new_rows
    # The whole context gets its blocks at once, although one step computes only part of it.
    assert len(row.token_ids) == num_tokens
    assert len(row.block_ids) == -(-num_tokens // 4)
    driver.finish()
    assert driver.core.stats.num_preemptions == 1
    for group, prompt in ((1, tuple(range(8))), (2, tuple(range(20, 28)))):
        request = make_request(group, prompt, max_tokens=9)
        assert driver.tokens[group, 0] == generate(prompt, (), 0, request.stop).token_ids


def test_priority_decides_who_gives_way():
    driver = CoreDriver(num_blocks=6, scheduling_policy="priority")
    driver.submit(make_request(1, range(8), max_tokens=9, priority=5))
    driver.submit(make_request(2, range(20, 28), max_tokens=9, priority=1))
    driver.finish()
    assert driver.core.take_events()[0].key == (1, 0)


def test_nobody_new_comes_in_during_a_step_that_preempts():
    """A new request would take the room that the preempted one needs to come back."""
    driver = CoreDriver(num_blocks=6, scheduling_policy="priority")
    driver.submit(make_request(1, range(8), max_tokens=9))
    driver.submit(make_request(2, range(20, 28), max_tokens=9, priority=1))
    driver.step()
    driver.step()
    # It is first in the queue and would fit into the blocks that the preempted request leaves.
    driver.submit(make_request(3, range(40, 48), priority=-1))
    while not driver.core.stats.num_preemptions:
        plan = driver.step()
        assert plan is not None
        assert not plan.new_rows
    assert driver.core.load.num_free_blocks == 2
    driver.finish()


def test_a_preempted_request_finds_its_own_blocks_again():
    driver = CoreDriver(num_blocks=7)
    driver.submit(make_request(1, range(8), max_tokens=9))
    driver.submit(make_request(2, range(20, 28), max_tokens=9))
    while not driver.core.stats.num_preemptions:
        driver.step()
    while not (plan := driver.step()) or not plan.new_rows:
        pass
    assert plan.new_rows[0].num_computed_tokens > 0
    driver.finish()


def test_a_withdrawn_block_is_not_served():
    """A decode is planned and fills a block; then the chunk of a request of higher priority takes its blocks. The
    filled block was never computed to its end, so no request may find it."""
    driver = CoreDriver(num_blocks=15, max_num_batched_tokens=10, scheduling_policy="priority")
    # Holds the first block that the victim would publish, so that one of the victim's blocks is free instead of cached,
    # and is taken before the filled one.
    driver.submit(make_request(1, [*range(20, 24), 1], max_tokens=20))
    driver.submit(make_request(2, range(20, 27), max_tokens=20, priority=1, bypass_prefix_cache=True))
    driver.step()
    driver.step()
    driver.submit(make_request(3, range(40, 80), max_tokens=1))
    while not driver.core.stats.num_preemptions:
        driver.step()
    output = driver.tokens[2, 0]
    # Checks that this is the case to test: the next token was the last of a block.
    assert (7 + len(output)) % 4 == 0
    driver.cancel(2)
    full = generate(tuple(range(20, 27)), (), 0, make_request(2, [1], max_tokens=20).stop).token_ids
    resumed = ChoiceStart(choice=0, output_token_ids=tuple(full[: len(output) + 3]))
    driver.submit(make_request(4, range(20, 27), max_tokens=20, choices=[resumed]))
    plan = driver.step()
    assert plan is not None
    assert [row.num_computed_tokens for row in plan.new_rows] == [8]
    driver.finish()
    assert driver.tokens[4, 0] == full


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [3, 5, 64])
def test_many_that_hardly_fit_all_end_exactly(budget: int, caching: bool):
    """vllm#52520 and #45388: near capacity, other schedulers recompute for ever or stall."""
    driver = CoreDriver(num_blocks=8, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    requests = [
        make_request(group, [group, *range(group % 9)], max_tokens=23, choices=1 + group % 3) for group in range(1, 13)
    ]
    for request in requests:
        assert driver.submit(request) is None
    driver.finish()
    assert driver.core.stats.num_preemptions >= 10
    for request in requests:
        for start in request.choices:
            expected = generate(request.prompt_token_ids, (), start.choice, request.stop)
            assert driver.tokens[request.group, start.choice] == expected.token_ids
