"""Each kind of grey failure once, briefly: no stream loses a token, none gets one twice, nothing healthy is restarted.

A short form of `python -m benchmarks.faults.chaos --grey`: real processes that talk over tcp, through relays.
"""

from collections.abc import Iterator

import pytest

from benchmarks.faults.crowd import make_plans
from benchmarks.faults.grey.ground import Ground, standing
from benchmarks.faults.grey.kinds import FAULTS
from benchmarks.faults.grey.report import table
from benchmarks.faults.grey.run import Runner, Streams, injections

# Fewer plans than streams: each is used several times.
NUM_PLANS, NUM_TOKENS, SEED = 30, 16, 11


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with standing(tmp_path_factory.mktemp("grey"), has_weights=False) as ground:
        yield ground


async def test_streams_survive_each_grey_failure_that_is_short(ground: Ground) -> None:
    faults = [fault for fault in FAULTS.values() if fault.brief is not None and not fault.missing()]
    streams = Streams(make_plans(NUM_PLANS, SEED, mean_tokens=NUM_TOKENS))
    results = await Runner(ground, streams, print).run(injections(faults, 1, SEED, longest=1.0, brief=True))
    assert all(each.is_clean for each in results), f"{table(results)}\n\n{ground.cluster.up.output}"
    assert all(each.num_streams for each in results), table(results)
    assert sum(each.num_sampled for each in results)
