"""kill -9 of each kind of process in mid-stream, and of both schedulers at once: SmolLM2's output is as without faults,
also where it is constrained or calls tools, where streams migrate, and where their connections are cut. Then clients of
all kinds, well-behaved and misbehaving: they leave nothing behind. Then two batches of one input.

Short forms of `python -m benchmarks.faults.chaos`, `benchmarks.faults.soak` and `benchmarks.faults.batches`: two
replicas of two stages and two routers under `octavo up`, real weights, real sockets, greedy and sampled streams, with
and without seeds from the client.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults import bad_input, traffic
from benchmarks.faults.batches import run_batches
from benchmarks.faults.batches import summary as batches_summary
from benchmarks.faults.chaos import run_attached, run_chaos, summary
from benchmarks.faults.cluster import Cluster, Kind
from benchmarks.faults.command import NUM_REPLICAS, NUM_ROUTERS, NUM_STAGES
from benchmarks.faults.crowd import make_plans
from benchmarks.faults.kills import choose_kinds
from benchmarks.faults.soak import SOAK_FLAGS, run_soak
from benchmarks.faults.soak import summary as soak_summary
from benchmarks.faults.streams.attached.plans import EVENTS, GRPC
from benchmarks.faults.streams.structured.checks import breaches
from benchmarks.faults.streams.structured.plans import TOOL_FLAGS, make_structured_plans
from tests.support.ports import free_ports

NUM_STREAMS, NUM_TOKENS, SEED = 24, 24, 3
SOAK_SECONDS, NUM_CLIENTS = 4.0, 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("chaos")
    with Cluster(
        directory,
        *SOAK_FLAGS,
        *TOOL_FLAGS,
        f"--http-port={free_ports(NUM_ROUTERS)}",
        f"--batches-dir={directory / 'batches'}",
        num_replicas=NUM_REPLICAS,
        num_stages=NUM_STAGES,
        num_routers=NUM_ROUTERS,
    ) as cluster:
        cluster.wait_until_all_serve()
        yield cluster


async def test_streams_survive_kills_of_each_kind(cluster: Cluster) -> None:
    plans = make_plans(NUM_STREAMS, SEED, mean_tokens=NUM_TOKENS)
    kills = choose_kinds(len(Kind), random.Random(SEED))
    report = await run_chaos(cluster, plans, kills, SEED, say=print)
    shown = summary(report)
    assert report.is_clean, f"{shown}\n\n{cluster.up.output}"
    killed = Counter(place.kind for kill in report.kills for place in kill.victims)
    assert killed == {Kind.WORKER: 1, Kind.SCHEDULER: 2, Kind.ROUTER: 1}
    assert report.resubmissions_by_routers, shown
    assert report.resumes_by_clients, shown


# With these seeds a tenth of the tokens has come when the process is killed.
@pytest.mark.parametrize(("kind", "seed"), [(Kind.SCHEDULER, 8), (Kind.ROUTER, 24)])
async def test_constrained_and_tool_calling_streams_survive(cluster: Cluster, kind: Kind, seed: int) -> None:
    """tests/integration/cluster/test_constraints.py kills their worker."""
    # One of each of the first kinds, greedy and sampled in turn; two choices of the regular expression, which is short.
    plans = [
        replace(plan, sampling=replace(plan.sampling, n=2 if plan.kind == "regex" else 1))
        for plan in make_structured_plans(12, seed, max_tokens=52)
        if plan.number % 4 in (0, 3)
    ]
    report = await run_chaos(cluster, plans, [(kind,)], seed, say=print, check=breaches)
    shown = summary(report)
    assert report.is_clean, f"{shown}\n\n{cluster.up.output}"
    assert len(report.kinds) == len(plans) == 6
    assert sum(counts.num_calls for counts in report.kinds.values()) >= 2, shown
    assert report.num_moved, shown


async def test_streams_that_outlive_their_connections_survive_the_router_that_holds_them(cluster: Cluster) -> None:
    report = await run_attached(cluster, 16, [(Kind.ROUTER,)], 28, mean_tokens=NUM_TOKENS, say=print)
    shown = summary(report)
    assert report.is_clean, f"{shown}\n\n{cluster.up.output}"
    assert {name: counts.num_streams for name, counts in report.kinds.items()} == {GRPC: 8, EVENTS: 8}
    # How often each happens depends on how many tokens a message holds, which depends on the load of the machine.
    for what in ("connections cut", "attached over gRPC", "attached over HTTP"):
        assert report.reading[what], shown


async def test_clients_of_all_manners_leave_nothing_behind(cluster: Cluster) -> None:
    report = await run_soak(cluster, seconds=SOAK_SECONDS, num_clients=NUM_CLIENTS, seed=SEED, say=print, kills=False)
    assert report.is_clean, f"{soak_summary(report)}\n\n{cluster.up.output}"
    assert {growth.name for growth in report.growths} == {str(place) for place in cluster.places()} | {"octavo up"}
    came = {end.partition(":")[0] for end in report.ends}
    assert came == {manner.__name__ for manner in (*traffic.MANNERS, *bad_input.MANNERS)}


async def test_each_line_of_a_batch_is_written_once(cluster: Cluster) -> None:
    directory = Path(cluster.options.batches_dir).parent
    report = await run_batches(cluster, directory, num_lines=30, num_kills=3, num_tokens=6, seed=SEED, say=print)
    assert report.is_clean, f"{batches_summary(report)}\n\n{cluster.up.output}"
    assert [kill.split()[0] for kill in report.kills] == ["router", "scheduler", "worker"]
    assert report.outcomes["200"] == 54
    assert report.num_looks
