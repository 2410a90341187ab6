"""The preemption rule compared with vLLM's on one load; for more loads see benchmarks/scheduler/preemption_rules.py."""

import pytest

from tests.support.scheduler.core import CoreDriver, make_request


def outputs_and_preemptions(rule: str, mode: str, num_blocks: int) -> tuple[dict[tuple[int, int], list[int]], int]:
    driver = CoreDriver(
        num_blocks=num_blocks,
        max_num_seqs=12,
        max_num_batched_tokens=16,
        preemption_policy=rule,
        preemption_mode=mode,
        num_swap_blocks=num_blocks if mode == "swap" else 0,
    )
    for group in range(1, 41):
        driver.submit(make_request(group, [group, *range(group % 23)], max_tokens=20 + group % 17))
    driver.finish()
    return driver.tokens, driver.core.stats.num_preemptions


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_whole_context_preempts_less_often_and_outputs_are_those_of_a_pool_that_holds_everything(mode: str):
    expected, none = outputs_and_preemptions("whole_context", mode, 400)
    ours, num_ours = outputs_and_preemptions("whole_context", mode, 40)
    theirs, num_theirs = outputs_and_preemptions("first_chunk", mode, 40)
    assert none == 0
    assert ours == theirs == expected
    assert 0 < num_ours < num_theirs
