"""kill -9 of each kind of process in mid-stream, and of both schedulers at once: SmolLM2's output is as without faults,
also where it is constrained or calls tools, where streams migrate, and where their connections are cut. Then clients of
all kinds, well-behaved and misbehaving: they leave nothing behind. Then two batches of one input.

Short forms of `python -m benchmarks.faults`: two replicas of two stages and two routers under `octavo up`, real
weights, real sockets, greedy and sampled streams, with and without seeds from the client.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.faults.cluster import Kind
from benchmarks.faults.crowd import Plan
from benchmarks.faults.driver import Fault, Report, Traffic, injections, run
from benchmarks.faults.ground import Ground, standing
from benchmarks.faults.kinds.kills import KILLS, choose_kills
from benchmarks.faults.traffics import ATTACHED, PLAIN, STRUCTURED
from benchmarks.faults.traffics.attached import EVENTS, GRPC
from benchmarks.faults.traffics.batches import Batches
from benchmarks.faults.traffics.clients import CLIENT_FLAGS, Clients
from benchmarks.faults.traffics.manners import BAD, GOOD
from benchmarks.faults.traffics.streams import StreamKind, Streams

NUM_STREAMS, NUM_TOKENS, SEED = 24, 24, 3
SOAK_SECONDS, NUM_CLIENTS = 4.0, 8


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with standing(tmp_path_factory.mktemp("faults"), *CLIENT_FLAGS) as ground:
        yield ground


async def clean(ground: Ground, traffic: Traffic, faults: Iterable[Fault], seed: int = SEED) -> Report:
    report = await run(ground, traffic, injections(faults, seed, longest=1.0), seed)
    assert report.is_clean, f"{report}\n\n{ground.cluster.up.output}"
    return report


async def streams(
    ground: Ground, kind: StreamKind, plans: Sequence[Plan], faults: Sequence[Fault], seed: int
) -> Report:
    return await clean(ground, Streams(ground, print, kind, plans, num_faults=len(faults), seed=seed), faults, seed)


async def test_streams_survive_kills_of_each_kind(ground: Ground) -> None:
    kills = choose_kills(len(Kind), random.Random(SEED))
    report = await streams(ground, PLAIN, PLAIN.make(NUM_STREAMS, SEED, NUM_TOKENS), kills, SEED)
    killed = Counter(name.split()[0] for hit in report.hits for name in hit.victims)
    assert killed == {Kind.WORKER: 1, Kind.SCHEDULER: 2, Kind.ROUTER: 1}
    assert report.figures["equal"] == report.figures["streams"] >= NUM_STREAMS
    assert report.figures["resubmissions_by_routers"], report
    assert report.figures["resumes_by_clients"], report


# With these seeds a tenth of the tokens has come when the process is killed.
@pytest.mark.parametrize(("kind", "seed"), [(Kind.SCHEDULER, 8), (Kind.ROUTER, 24)])
async def test_constrained_and_tool_calling_streams_survive(ground: Ground, kind: Kind, seed: int) -> None:
    """tests/integration/cluster/test_constraints.py kills their worker."""
    # One of each of the first kinds, greedy and sampled in turn; two choices of the regular expression, which is short.
    plans = [
        replace(plan, sampling=replace(plan.sampling, n=2 if plan.kind == "regex" else 1))
        for plan in STRUCTURED.make(12, seed, 52)
        if plan.number % 4 in (0, 3)
    ]
    report = await streams(ground, STRUCTURED, plans, [KILLS[kind,]], seed)
    assert len(report.figures["kinds"]) == len(plans) == 6
    assert sum(counts["calls"] for counts in report.figures["kinds"].values()) >= 2, report
    assert report.figures["migrations"], report


async def test_streams_that_outlive_their_connections_survive_the_router_that_holds_them(ground: Ground) -> None:
    report = await streams(ground, ATTACHED, ATTACHED.make(16, 28, NUM_TOKENS), [KILLS[Kind.ROUTER,]], 28)
    kinds = {name: counts["streams"] for name, counts in report.figures["kinds"].items()}
    assert kinds == {GRPC: 8, EVENTS: 8}
    # How often each happens depends on how many tokens a message holds, which depends on the load of the machine.
    for what in ("connections cut", "attached over gRPC", "attached over HTTP"):
        assert report.figures["reading"][what], report


async def test_clients_of_all_manners_leave_nothing_behind(ground: Ground) -> None:
    report = await clean(ground, Clients(ground, print, seconds=SOAK_SECONDS, num_clients=NUM_CLIENTS, seed=SEED), ())
    processes = {each["process"] for each in report.figures["processes"]}
    assert processes == {str(place) for place in ground.cluster.places()} | {"octavo up"}
    came = {end.partition(":")[0] for end in report.figures["ends"]}
    assert came == {manner.__name__ for manner in (*GOOD, *BAD)}


async def test_each_line_of_a_batch_is_written_once(ground: Ground) -> None:
    traffic = Batches(ground, print, num_lines=30, num_tokens=6, num_faults=3, seed=SEED)
    report = await clean(ground, traffic, [KILLS[kind,] for kind in (Kind.ROUTER, Kind.SCHEDULER, Kind.WORKER)])
    assert report.figures["outcomes"]["200"] == 54
    assert report.figures["looks"]
    assert report.figures["commands_killed"] == 1
