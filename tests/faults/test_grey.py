"""Each kind of grey failure once, briefly: no stream loses a token, none gets one twice, nothing healthy is restarted.

A short form of `python -m benchmarks.faults --kinds grey`: real processes that talk over tcp, through relays.
"""

from pathlib import Path

from benchmarks.faults.driver import injections, run
from benchmarks.faults.ground import FLAGS, standing
from benchmarks.faults.kinds import GREY
from benchmarks.faults.traffics import PLAIN
from benchmarks.faults.traffics.streams import Streams

# Fewer plans than streams: each is used several times.
NUM_PLANS, NUM_TOKENS, SEED = 30, 16, 11


async def test_streams_survive_each_grey_failure_that_is_short(tmp_path: Path) -> None:
    faults = [fault for fault in GREY.values() if fault.brief is not None and not fault.missing()]
    with standing(tmp_path, *FLAGS, has_means=True) as ground:
        plans = PLAIN.make(NUM_PLANS, SEED, NUM_TOKENS)
        traffic = Streams(ground, print, PLAIN, plans, num_faults=len(faults), seed=SEED)
        report = await run(ground, traffic, injections(faults, SEED, longest=1.0, brief=True), SEED)
        assert report.is_clean, f"{report}\n\n{ground.cluster.up.output}"
    assert [hit.kind for hit in report.hits] == [fault.name for fault in faults]
    assert all(hit.counts["streams"] for hit in report.hits), report
    assert sum(hit.counts["sampled"] for hit in report.hits)
