"""The states that streams of a router go through: those of the table, all of them, and no others."""

import ast
import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from router.replicas.health.held_back import Hold
from router.server import RouterServer
from router.streams import migrations, placement
from router.streams.states import FOLLOWERS, Lifecycle, StreamState
from router.streams.stream import Stream
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.repository import ROOT, files, name

WAITING, PLACED, RESTING, PARKED, ENDED, ATTACHED, DETACHED, FORGOTTEN = StreamState

NUM_TOKENS = 8


class Cluster(NamedTuple):
    server: RouterServer
    stub: Any
    fake: FakeScheduler
    other: FakeScheduler
    # The states of each stream, and of each that may lose its reader, in order.
    paths: dict[Lifecycle, list[StreamState]]

    async def until(self, *states: StreamState) -> None:
        """Waits until the latest stream has gone through these states."""
        async with asyncio.timeout(20):
            while tuple(self.latest) != states:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.002)

    @property
    def latest(self) -> list[StreamState]:
        return list(self.paths.values())[-1] if self.paths else []

    def hold(self, hold: Hold) -> None:
        for replica in self.server._replicas.replicas:
            replica.set_hold(hold)


def _asked(request_id: str = "a", **sampling: Any) -> pb.GenerateRequest:
    params: dict[str, Any] = {"max_tokens": NUM_TOKENS, "seed": 5, **sampling}
    return pb.GenerateRequest(request_id=request_id, prompt="Once upon", sampling=pb.SamplingParams(**params))


def _search(max_tokens: int) -> pb.GenerateRequest:
    asked = _asked(max_tokens=max_tokens, n=2, ignore_eos=True)
    asked.beam_search.width = 2
    return asked


def _detached(request_id: str = "a") -> pb.GenerateRequest:
    asked = _asked(request_id)
    asked.detach_timeout = 60.0
    return asked


async def _begun(call: Any) -> Received:
    return await receive(call, until=lambda received: bool(received.token_ids))


async def _leave(call: Any) -> None:
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.code()


async def _code(call: Any) -> grpc.StatusCode:
    """Reads a call to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def _plain(it: Cluster) -> None:
    await receive(it.stub.Generate(_asked()))


async def _refused(it: Cluster) -> None:
    it.fake.capacity = 0
    assert await _code(it.stub.Generate(_asked())) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def _already_complete(it: Cluster) -> None:
    received = await receive(it.stub.Generate(_asked()))
    received.finish.clear()
    it.paths.clear()
    assert await _code(it.stub.Generate(received.resume_request())) is grpc.StatusCode.OK


async def _parked(it: Cluster) -> tuple[Any, Received]:
    it.fake.pause_at = 2
    call = it.stub.Generate(_asked())
    received = await _begun(call)
    await it.fake.kill()
    await it.until(WAITING, PLACED, WAITING, PARKED)
    return call, received


async def _lost_and_back(it: Cluster) -> None:
    call, received = await _parked(it)
    it.fake.pause_at = None
    await it.fake.start()
    await receive(call, into=received)
    assert len(received.token_ids[0]) == NUM_TOKENS


async def _cancelled_while_parked(it: Cluster) -> None:
    call, _ = await _parked(it)
    await it.stub.Cancel(pb.CancelRequest(request_id="a"))
    assert await _code(call) is grpc.StatusCode.CANCELLED


async def _moved(it: Cluster) -> None:
    async with running_schedulers(it.other):
        await it.server.wait_ready()
        for fake in (it.fake, it.other):
            fake.pause_at = 2
        call = it.stub.Generate(_asked(max_tokens=40))
        received = await _begun(call)
        left, other = sorted((it.fake, it.other), key=lambda fake: not fake.num_live)
        left.draining = True
        left.send_load()
        await it.until(WAITING, PLACED, WAITING, PLACED)
        await other.resume_steps()
        await receive(call, into=received)
        assert len(received.token_ids[0]) == 40


async def _searched(it: Cluster) -> None:
    await receive(it.stub.Generate(_search(2)))


async def _parked_between_steps(it: Cluster) -> None:
    it.fake.pause_at = 0
    call = it.stub.Generate(_search(2))
    await it.fake.wait_until(lambda fake: fake.num_live > 0)
    it.hold(Hold.PAUSED)
    await it.fake.resume_steps()
    await it.until(WAITING, PLACED, RESTING, PARKED)
    it.hold(Hold.NONE)
    await receive(call)


async def _read_by_two(it: Cluster) -> None:
    """The first reader leaves, the second is displaced by a third, which leaves; then its time is over."""
    it.fake.pause_at = 2
    call = it.stub.Generate(_detached())
    await _begun(call)
    await _leave(call)
    await it.until(ATTACHED, ATTACHED, DETACHED)
    second = it.stub.Attach(pb.AttachRequest(request_id="a"))
    await _begun(second)
    third = it.stub.Attach(pb.AttachRequest(request_id="a"))
    await _begun(third)
    assert await _code(second) is grpc.StatusCode.ABORTED
    await _leave(third)
    await it.until(ATTACHED, ATTACHED, DETACHED, ATTACHED, ATTACHED, DETACHED)
    it.server.held_streams.drop("a")


async def _one_too_many(it: Cluster) -> None:
    it.fake.pause_at = 2
    for request_id, last in (("a", DETACHED), ("b", FORGOTTEN)):
        it.paths.clear()
        call = it.stub.Generate(_detached(request_id))
        await _begun(call)
        await _leave(call)
        await it.until(ATTACHED, ATTACHED, last)


Scenario = Callable[[Cluster], Awaitable[None]]
SCENARIOS: dict[Scenario, list[StreamState]] = {
    _plain: [WAITING, PLACED, ENDED],
    _refused: [WAITING, PLACED, WAITING, ENDED],
    _already_complete: [WAITING, ENDED],
    _lost_and_back: [WAITING, PLACED, WAITING, PARKED, PLACED, ENDED],
    _cancelled_while_parked: [WAITING, PLACED, WAITING, PARKED, ENDED],
    _moved: [WAITING, PLACED, WAITING, PLACED, ENDED],
    _searched: [WAITING, PLACED, RESTING, PLACED, RESTING, ENDED],
    _parked_between_steps: [WAITING, PLACED, RESTING, PARKED, PLACED, RESTING, ENDED],
    _read_by_two: [ATTACHED, ATTACHED, DETACHED, ATTACHED, ATTACHED, DETACHED, FORGOTTEN],
    _one_too_many: [ATTACHED, ATTACHED, FORGOTTEN],
}


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths: dict[Lifecycle, list[StreamState]] = {}
    become = Lifecycle.become

    def noting(self: Lifecycle, state: StreamState) -> bool:
        before = self.state
        if not become(self, state):
            return False
        paths.setdefault(self, [before]).append(state)
        return True

    monkeypatch.setattr(Lifecycle, "become", noting)
    monkeypatch.setattr(migrations, "_SETTLE_S", 0.01)
    monkeypatch.setattr(placement, "_TRY_AGAIN_S", 0.02)
    fake, other = (
        FakeScheduler(socket_address(tmp_path, name), likely=lambda token_ids: [(7, -0.5), (8, -1.5)])
        for name in ("one", "two")
    )
    async with (
        asyncio.timeout(60),
        running_schedulers(fake),
        running_router([fake.address, other.address], max_detached_streams=1) as (server, stub),
    ):
        while not server.readiness()[0]:  # noqa: ASYNC110 - only that of all replicas is told
            await asyncio.sleep(0.005)
        yield Cluster(server, stub, fake, other, paths)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
async def test_a_stream_goes_through_these_states(cluster: Cluster, scenario: Scenario) -> None:
    await scenario(cluster)
    expected = SCENARIOS[scenario]
    kind = ATTACHED in expected
    async with asyncio.timeout(20):
        while not any(path == expected for path in cluster.paths.values()):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.002)
    found = [path for path in cluster.paths.values() if (ATTACHED in path) == kind]
    assert found == [expected]


def test_the_table_has_these_changes_and_no_more() -> None:
    seen = {change for path in SCENARIOS.values() for change in pairwise(path)}
    assert seen == {(state, later) for state, followers in FOLLOWERS.items() for later in followers}
    assert set(FOLLOWERS) == set(StreamState)


def test_one_method_sets_the_state() -> None:
    setters = {
        name(path)
        for path in files(".py", under=ROOT / "router")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    }
    # The others have states of replicas.
    assert setters == {"router/api/observer.py", "router/replicas/health/pace.py", "router/streams/states.py"}


async def test_a_change_that_the_table_lacks_ends_one_stream_and_the_router_serves_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.fake.pause_at = 2
    calls = {request_id: cluster.stub.Generate(_asked(request_id)) for request_id in ("wrong", "right")}
    for call in calls.values():
        await _begun(call)
    stream = cluster.server.streams.find("wrong")
    assert isinstance(stream, Stream)
    assert stream.placement.session is not None
    with caplog.at_level(logging.ERROR, "octavo.router.streams"):
        stream.placement.submit_to(stream.placement.session)
    assert "which is a fault of the router" in caplog.text
    assert await _code(calls["wrong"]) is grpc.StatusCode.INTERNAL
    await cluster.fake.wait_until(lambda fake: fake.num_live == 1)
    await cluster.fake.resume_steps()
    assert await _code(calls["right"]) is grpc.StatusCode.OK
    assert (await receive(cluster.stub.Generate(_asked()))).finished is not None


async def test_a_held_stream_that_breaks_the_table_is_forgotten(cluster: Cluster) -> None:
    cluster.fake.pause_at = 2
    call = cluster.stub.Generate(_detached())
    await _begun(call)
    await _leave(call)
    await cluster.until(ATTACHED, ATTACHED, DETACHED)
    held = cluster.server.held_streams.find("a")
    assert held is not None
    assert not held.become(StreamState.PLACED)
    assert await _code(cluster.stub.Attach(pb.AttachRequest(request_id="a"))) is grpc.StatusCode.NOT_FOUND
    await cluster.fake.wait_until(lambda fake: not fake.num_live)
