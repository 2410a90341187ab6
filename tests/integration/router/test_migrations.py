"""Streams that leave a replica that still has them, and replicas that are left out: tokens stay the same."""

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from protos import admin_pb2
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos.admin_pb2_grpc import AdminStub
from router.replicas.replica import Replica
from router.server import RouterServer
from router.streams import migrations
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_SETTLE_S", 0.01)


def _request(request_id: str = "r", *, max_tokens: int = NUM_TOKENS, n: int = 1) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=7, n=n)
    return pb.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=sampling)


def _fakes(directory: Path, *names: str, **fields: object) -> list[FakeScheduler]:
    return [FakeScheduler(socket_address(directory, name), **fields) for name in names]  # type: ignore[arg-type]


async def _undisturbed(directory: Path, request: pb.GenerateRequest) -> Received:
    (fake,) = _fakes(directory, "undisturbed")
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        return await receive(stub.Generate(request))


async def _begun(stub, request: pb.GenerateRequest, num_tokens: int) -> tuple[grpc.aio.Call, Received]:
    call = stub.Generate(request)
    choices = max(request.sampling.n, 1)
    return call, await receive(call, until=lambda r: sorted(map(len, r.token_ids.values())) == [num_tokens] * choices)


def _same(one: Received, other: Received) -> bool:
    return (one.token_ids, one.text, one.finish) == (other.token_ids, other.text, other.finish)


def _moved(server: RouterServer, cause: str) -> float | None:
    return server.metrics.registry.get_sample_value("octavo_migrations_total", {"cause": cause})


def _drain(*fakes: FakeScheduler) -> None:
    for fake in fakes:
        fake.draining = True
        fake.send_load()


async def _until_described(server: RouterServer, condition: Callable[[str], bool]) -> None:
    async with asyncio.timeout(10):
        # There is no event for changes of the readiness text.
        while not condition(server.readiness()[1]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_streams_leave_a_replica_that_drains_and_are_spread(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request(n=2))
    first, *others = _fakes(tmp_path, "a", "b", "c", pause_at=5)
    async with (
        running_schedulers(first, *others),
        running_router([f.address for f in (first, *others)]) as (server, stub),
    ):
        await server.wait_ready()
        streams = [await _begun(stub, _request(f"r{i}", n=2), 5) for i in range(12)]
        assert first.num_live == 8
        for other in others:
            other.pause_at = 7
        # The draining replica continues for a moment: tokens that it sends after the move are dropped.
        first.pause_at = 7
        _drain(first)
        await first.wait_until(lambda fake: fake.num_live == 0)
        assert {cancel.reason for cancel in first.cancelled} == {wire.CANCEL_REASON_MOVED}
        await asyncio.gather(*(other.wait_until(lambda fake: fake.num_live == 12) for other in others))
        for other in others:
            await other.resume_steps()
        for call, received in streams:
            await receive(call, into=received)
            assert _same(received, want)
            assert received.exact
        assert _moved(server, "drain") == 4


async def test_drafts_are_counted_at_all_replicas_of_a_stream(tmp_path: Path) -> None:
    """They are told with the ends of choices; that of the first replica comes after the stream has left."""
    first, second = _fakes(tmp_path, "a", "b", pause_at=5)
    first.drafts, second.drafts = (10, 6), (100, 60)
    async with (
        running_schedulers(first, second),
        running_router([f.address for f in (first, second)]) as (server, stub),
    ):
        await server.wait_ready()
        both = [await _begun(stub, _request(f"r{i}", n=2), 5) for i in range(2)]
        _drain(first)
        await second.wait_until(lambda fake: fake.num_live == 4)
        await asyncio.gather(first.resume_steps(), second.resume_steps())
        usages = [(await receive(call, into=received)).finished.usage for call, received in both]
    assert sorted((usage.draft_tokens, usage.accepted_draft_tokens) for usage in usages) == [(200, 120), (220, 132)]


async def test_streams_stay_at_a_replica_that_drains_if_they_would_gain_nothing(tmp_path: Path) -> None:
    """Streams stay if they are near their end, or if the other replicas also drain or have another fingerprint."""
    first, second, another = _fakes(tmp_path, "a", "b", "c", pause_at=5)
    another.model = model_info(fingerprint="two")
    async with (
        running_schedulers(first),
        running_router([f.address for f in (first, second, another)]) as (server, stub),
    ):
        await _until_described(server, lambda text: text.count("ready") == 1)
        near, far = await _begun(stub, _request("near", max_tokens=9), 5), await _begun(stub, _request("far"), 5)
        async with running_schedulers(another):
            _drain(first)
            await another.wait_until(lambda fake: bool(fake.routers))
            async with running_schedulers(second):
                await second.wait_until(lambda fake: fake.num_live == 1)
                await first.wait_until(lambda fake: fake.num_live == 1)
                # Both remaining replicas drain now: no stream moves.
                _drain(second)
                await asyncio.gather(first.resume_steps(), second.resume_steps())
                for call, received in (near, far):
                    await receive(call, into=received)
                    assert received.finished is not None
        assert another.submitted == []
        assert _moved(server, "drain") == 1


async def test_streams_leave_once_a_full_queue_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other change at that replica triggers the move: the router looks again by itself."""
    monkeypatch.setattr(migrations, "_LOOK_AGAIN_S", 0.01)
    looked, empty = asyncio.Event(), migrations.Migrations._empty

    def noting(self: migrations.Migrations, replica: Replica) -> Generator[None, None, int]:
        looked.set()
        return empty(self, replica)

    monkeypatch.setattr(migrations.Migrations, "_empty", noting)
    first, full = _fakes(tmp_path, "a", "b", pause_at=5)
    full.refused_priority = 0
    async with running_schedulers(first, full), running_router([first.address, full.address]) as (server, stub):
        await server.wait_ready()
        call, received = await _begun(stub, _request(), 5)
        assert first.num_live == 1
        _drain(first)
        await looked.wait()
        assert full.submitted == []
        full.refused_priority = full.pause_at = None
        full.send_load()
        await receive(call, into=received)
        assert received.finished is not None
        assert len(full.submitted) == 1


async def test_a_replica_whose_steps_do_not_complete_is_left(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request())
    fakes = _fakes(tmp_path, "a", "b", pause_at=5)
    async with (
        running_schedulers(*fakes),
        running_router([f.address for f in fakes], replica_stall_timeout=0.3) as (server, stub),
    ):
        await server.wait_ready()
        call, received = await _begun(stub, _request(), 5)
        stalled = next(fake for fake in fakes if fake.num_live)
        other = next(fake for fake in fakes if fake is not stalled)
        other.pause_at = None
        await receive(call, into=received)
        assert _same(received, want)
        assert _moved(server, "stall") == 1
        await stalled.wait_until(lambda fake: fake.num_live == 0)
        assert "left out for" in server.readiness()[1]
        # New requests go elsewhere until this replica makes progress.
        for i in range(3):
            await receive(stub.Generate(_request(f"new{i}")))
        assert len(stalled.submitted) == 1
        stalled.pause_at, stalled.last_step = None, stalled.last_step + 1
        stalled.send_load()
        await _until_described(server, lambda text: "left out for" not in text)
        for i in range(2):
            await receive(stub.Generate(_request(f"again{i}")))
        assert len(stalled.submitted) == 2


async def test_a_replica_that_fails_requests_gets_no_more_unless_it_is_the_last(tmp_path: Path) -> None:
    broken, sound = _fakes(tmp_path, "a", "b")
    broken.is_broken = True
    async with running_schedulers(broken, sound), running_router([broken.address, sound.address]) as (server, stub):
        await server.wait_ready()
        statuses = []
        for i in range(20):
            call = stub.Generate(_request(f"r{i}", max_tokens=2))
            try:
                await receive(call)
            except grpc.aio.AioRpcError as error:
                statuses.append(error.code())
        assert statuses == [grpc.StatusCode.INTERNAL] * 5
        labels = {"replica": broken.address}
        assert server.metrics.registry.get_sample_value("octavo_replicas_left_out_total", labels) == 1
        await sound.kill()
        await broken.wait_until(lambda fake: len(fake.routers) == 1)
        broken.is_broken = False
        await _until_described(server, lambda text: text.count("ready") == 1)
        assert (await receive(stub.Generate(_request("last")))).finished is not None


async def test_a_request_is_moved_on_demand(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request())
    first, second, another = _fakes(tmp_path, "a", "b", "c", pause_at=5)
    another.model = model_info(fingerprint="two")
    addresses = [fake.address for fake in (first, second, another)]
    async with (
        running_schedulers(first),
        running_router(addresses) as (server, stub),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        admin = AdminStub(channel)

        async def refused(request_id: str, replica: str = "") -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Migrate(admin_pb2.MigrateRequest(request_id=request_id, replica=replica))
            return caught.value.code(), caught.value.details() or ""

        await _until_described(server, lambda text: text.count("ready") == 1)
        call, received = await _begun(stub, _request(), 5)
        assert (await refused("nobody"))[0] is grpc.StatusCode.NOT_FOUND
        status, details = await refused("r", "unix:elsewhere")
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert all(address in details for address in addresses)
        assert (await refused("r"))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (await refused("r", first.address))[0] is grpc.StatusCode.FAILED_PRECONDITION
        async with running_schedulers(second, another):
            await asyncio.gather(*(fake.wait_until(lambda fake: bool(fake.routers)) for fake in (second, another)))
            await server.wait_ready()
            # A replica with another fingerprint would give another output.
            status, details = await refused("r", another.address)
            assert (status, another.address in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
            target = f"127.0.0.1:{server.port}"
            shown = await asyncio.to_thread(CliRunner().invoke, app, ["migrate", "r", "--target", target])
            assert shown.output == f"moved after 5 output tokens, from {first.address} to {second.address}\n"
            second.pause_at = 9
            await second.resume_steps()
            await receive(call, into=received)
        assert _same(received, want)
        assert [submit.attempt for submit in second.submitted] == [1]
        assert _moved(server, "asked") == 1
        await first.wait_until(lambda fake: fake.num_live == 0)
