"""kill -9 of each kind of process in mid-stream, and of both schedulers at once: SmolLM2 says what it says alone.

The short form of `python -m benchmarks.chaos`: two replicas of two stages and two routers under `octavo up`, real
weights, real sockets, greedy and sampled streams, with and without seeds of the client's.
"""

from collections import Counter
from pathlib import Path

from benchmarks.chaos import FLAGS, NUM_REPLICAS, NUM_ROUTERS, NUM_STAGES, run_chaos, summary
from benchmarks.faults.cluster import Cluster, Kind

NUM_STREAMS, NUM_TOKENS, SEED = 24, 24, 3


async def test_streams_survive_kills_of_each_kind(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, *FLAGS, num_replicas=NUM_REPLICAS, num_stages=NUM_STAGES, num_routers=NUM_ROUTERS
    ) as cluster:
        cluster.wait_until_all_serve()
        report = await run_chaos(cluster, NUM_STREAMS, len(Kind), SEED, mean_tokens=NUM_TOKENS, say=print)
    shown = summary(report)
    assert report.is_clean, f"{shown}\n\n{cluster.up.output}"
    killed = Counter(place.kind for kill in report.kills for place in kill.victims)
    assert killed == {Kind.WORKER: 1, Kind.SCHEDULER: 2, Kind.ROUTER: 1}
    assert report.resubmissions_by_routers, shown
    assert report.resumes_by_clients, shown
