"""Cancel, Explain, Migrate and Attach find a stream from every router, wherever it is and whatever its state."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from protos import admin_pb2
from protos import inference_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.server import RouterServer
from router.streams.states import StreamState
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

# What a request says at its router.
Begun = tuple[RouterServer, Any]


@contextlib.asynccontextmanager
async def _routers(directory: Path, *schedulers: FakeScheduler, **options: Any) -> AsyncIterator[tuple[Begun, Begun]]:
    """Two router processes of one machine over the same schedulers. options: more of theirs."""
    runtime = directory / "run"
    async with contextlib.AsyncExitStack() as running:
        await running.enter_async_context(running_schedulers(*schedulers))
        addresses = [scheduler.address for scheduler in schedulers]
        options = {"runtime_dir": runtime, "drain_timeout": 20, **options}
        both = [await running.enter_async_context(running_router(addresses, **options)) for _ in range(2)]
        for server, _ in both:
            await server.wait_ready()
        yield both[0], both[1]


def _asked(request_id: str, **fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=8, seed=7)
    return pb.GenerateRequest(request_id=request_id, prompt="Once upon", sampling=sampling, **fields)


def _has(num_tokens: int) -> Callable[[Received], bool]:
    return lambda received: len(received.token_ids.get(0, ())) >= num_tokens


async def _lose_reader(call: Any) -> None:
    await receive(call, until=_has(3))
    call.cancel()


async def _nothing(router: Begun, scheduler: FakeScheduler) -> None:
    pass


async def _park(router: Begun, scheduler: FakeScheduler) -> None:
    """Takes the replica away from all streams; schedulers still say who is there."""
    server, _ = router
    scheduler.draining = True
    scheduler.send_load()
    scheduler.give_up_all()
    async with asyncio.timeout(10):
        while any(stream.placement.state is StreamState.PLACED for stream in server.streams):  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)


async def _drain(router: Begun, scheduler: FakeScheduler) -> None:
    server, _ = router
    task = asyncio.create_task(server.drain())
    # Its first steps come before any wait.
    await asyncio.sleep(0)
    assert server.intake.draining
    _draining.add(task)
    task.add_done_callback(_draining.discard)


_draining: set[asyncio.Task[None]] = set()
STATES = pytest.mark.parametrize(
    "bring_about",
    [pytest.param(_nothing, id="running"), pytest.param(_park, id="waiting"), pytest.param(_drain, id="draining")],
)
BringAbout = Callable[[Begun, FakeScheduler], Awaitable[None]]


def _scheduler(directory: Path, name: str = "one") -> FakeScheduler:
    return FakeScheduler(socket_address(directory, name), pause_at=3)


@STATES
@pytest.mark.parametrize("has_reader", [True, False])
async def test_cancel(tmp_path: Path, bring_about: BringAbout, has_reader: bool) -> None:
    scheduler = _scheduler(tmp_path)
    async with _routers(tmp_path, scheduler) as (here, there):
        call = here[1].Generate(_asked("a", detach_timeout=0 if has_reader else 60))
        await receive(call, until=_has(3)) if has_reader else await _lose_reader(call)
        await bring_about(here, scheduler)
        assert (await there[1].Cancel(pb.CancelRequest(request_id="a"))).cancelled
        await here[0].streams.wait_empty()
        assert not (await there[1].Cancel(pb.CancelRequest(request_id="a"))).cancelled
        if has_reader:
            assert await call.code() is grpc.StatusCode.CANCELLED


@STATES
@pytest.mark.parametrize("has_reader", [True, False])
async def test_attach(tmp_path: Path, bring_about: BringAbout, has_reader: bool) -> None:
    scheduler = _scheduler(tmp_path)
    async with _routers(tmp_path, scheduler) as (here, there):
        call = here[1].Generate(_asked("a", detach_timeout=60))
        await receive(call, until=_has(3)) if has_reader else await _lose_reader(call)
        await bring_about(here, scheduler)
        reader = there[1].Attach(pb.AttachRequest(request_id="a"))
        received = await receive(reader, until=_has(3))
        if has_reader:
            assert await call.code() is grpc.StatusCode.ABORTED
        scheduler.pause_at, scheduler.draining = None, False
        scheduler.send_load()
        received = await receive(reader, into=received)
        assert len(received.token_ids[0]) == 8
        # A stream that has ended.
        again = await receive(there[1].Attach(pb.AttachRequest(request_id="a")))
        assert again.token_ids == received.token_ids
        held = pb.AttachChoice(index=0, num_tokens=9, text_bytes=1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await receive(there[1].Attach(pb.AttachRequest(request_id="a", choices=[held])))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await receive(there[1].Attach(pb.AttachRequest(request_id="b")))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_nobody_attaches_to_an_attempt_that_has_been_resumed_elsewhere(tmp_path: Path) -> None:
    """The first router's replica is another one, so that only the second router can tell it."""
    one, two = _scheduler(tmp_path), _scheduler(tmp_path, "two")
    async with _routers(tmp_path, one, two) as (here, there):
        call = here[1].Generate(_asked("a", detach_timeout=60))
        received = await receive(call, until=_has(3))
        call.cancel()
        (one if one.num_live else two).draining = True
        one.send_load()
        two.send_load()
        async with asyncio.timeout(10):
            while ": draining" not in there[0].readiness()[1]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        one.pause_at = two.pause_at = 5
        resume = received.resume_request()
        resume.detach_timeout = 60
        received.begin_again()
        call = there[1].Generate(resume)
        received = await receive(call, until=_has(5), into=received)
        call.cancel()
        async with asyncio.timeout(10):
            while here[0].held_streams.find("a") is not None:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        one.pause_at = two.pause_at = None
        received.begin_again()
        attached = pb.AttachRequest(request_id="a")
        attached.choices.add(index=0, num_tokens=5, text_bytes=len(received.text[0].encode()))
        received = await receive(here[1].Attach(attached), into=received)
        whole = await receive(there[1].Generate(_asked("b")))
        assert received.token_ids == whole.token_ids
        assert received.text == whole.text


@pytest.mark.parametrize("bring_about", [pytest.param(_nothing, id="running"), pytest.param(_drain, id="draining")])
@pytest.mark.parametrize("has_reader", [True, False])
async def test_migrate(tmp_path: Path, bring_about: BringAbout, has_reader: bool) -> None:
    one, two = _scheduler(tmp_path), _scheduler(tmp_path, "two")
    async with _routers(tmp_path, one, two) as (here, there):
        call = here[1].Generate(_asked("a", detach_timeout=60))
        await receive(call, until=_has(3)) if has_reader else await _lose_reader(call)
        await bring_about(here, one)
        source, target = (one, two) if one.num_live else (two, one)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{there[0].port}") as channel:
            admin: Any = AdminStub(channel)
            moved = await admin.Migrate(admin_pb2.MigrateRequest(request_id="a"))
            assert (moved.moved_from, moved.moved_to) == (source.address, target.address)
            assert moved.num_output_tokens == 3
            for asked, status in (
                (admin_pb2.MigrateRequest(request_id="a", replica="x"), grpc.StatusCode.INVALID_ARGUMENT),
                (admin_pb2.MigrateRequest(request_id="a", replica=target.address), grpc.StatusCode.FAILED_PRECONDITION),
                (admin_pb2.MigrateRequest(request_id="b"), grpc.StatusCode.NOT_FOUND),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await admin.Migrate(asked)
                assert error.value.code() is status
        await target.wait_until(lambda each: each.num_live == 1)


async def test_explain_tells_of_a_request_that_no_replica_has(tmp_path: Path) -> None:
    scheduler = _scheduler(tmp_path)
    async with _routers(tmp_path, scheduler) as (here, there):
        await _lose_reader(here[1].Generate(_asked("a", detach_timeout=60)))
        await _park(here, scheduler)
        for server, _ in (here, there):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                admin: Any = AdminStub(channel)
                (timeline,) = (await admin.Explain(admin_pb2.ExplainRequest(request_id="a"))).timelines
                assert (timeline.request_id, timeline.replica_id) == ("a", "router")
                assert timeline.entries[0].reason.endswith("with 3 output tokens")


async def test_an_admin_names_another_tenants_request_at_any_router(tmp_path: Path) -> None:
    one, two = _scheduler(tmp_path), _scheduler(tmp_path, "two")
    keys = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "carol")}
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n" + "".join(f"- {{name: {n}, key: {k}, admin: {str(n == 'alice').lower()}}}\n" for n, k in keys.items())
    )
    path.chmod(0o600)
    as_ = {name: (("authorization", f"Bearer {key}"),) for name, key in keys.items()}
    async with (
        _routers(tmp_path, one, two, api_keys_file=str(path)) as (here, there),
        grpc.aio.insecure_channel(f"127.0.0.1:{there[0].port}") as channel,
    ):
        admin: Any = AdminStub(channel)
        call = here[1].Generate(_asked("a"), metadata=as_["bob"])
        await receive(call, until=_has(3))
        source, target = (one, two) if one.num_live else (two, one)
        moved = await admin.Migrate(admin_pb2.MigrateRequest(request_id="bob/a"), metadata=as_["alice"])
        assert (moved.moved_from, moved.moved_to) == (source.address, target.address)
        # An own request of this name would be alice's.
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin.Migrate(admin_pb2.MigrateRequest(request_id="a"), metadata=as_["alice"])
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        await target.wait_until(lambda each: each.num_live == 1)
        source.draining = True
        source.send_load()
        async with asyncio.timeout(10):
            while f"{source.address}: draining" not in here[0].readiness()[1]:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        await _park(here, target)
        for name, request_id in (("alice", "bob/a"), ("bob", "a")):
            explain = admin_pb2.ExplainRequest(request_id=request_id)
            (timeline,) = (await admin.Explain(explain, metadata=as_[name])).timelines
            assert (timeline.request_id, timeline.replica_id) == (request_id, "router")
        # Another tenant learns nothing: the fake replicas do not answer Explain, and no router has such a request.
        for request_id in ("bob/a", "a"):
            explain = admin_pb2.ExplainRequest(request_id=request_id)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin.Explain(explain, metadata=as_["carol"])
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        call.cancel()


@pytest.mark.parametrize("bring_about", [pytest.param(_nothing, id="running"), pytest.param(_drain, id="draining")])
async def test_a_stream_over_http_goes_on_at_another_router(tmp_path: Path, bring_about: BringAbout) -> None:
    scheduler = _scheduler(tmp_path)
    async with _routers(tmp_path, scheduler) as (here, there), contextlib.AsyncExitStack() as running:
        clients: list[httpx.AsyncClient] = []
        for server, _ in (here, there):
            gateway = Gateway(
                server.intake, server.registry, server.readiness, max_body_bytes=2**20, attachments=server.attachments
            )
            serving = GatewayServer(gateway, "127.0.0.1", 0)
            serving.start()
            running.push_async_callback(serving.stop)
            url = f"http://127.0.0.1:{serving.port}"
            clients.append(await running.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20)))
        body = {"prompt": "Once upon", "max_tokens": 8, "seed": 7, "stream": True, "detach_timeout": 60}
        first, second = clients
        named = {"x-request-id": "a"}
        async with first.stream("POST", "/v1/completions", json=body, headers=named) as response:
            async for line in response.aiter_lines():
                if line == "id: 1":
                    break
        await bring_about(here, scheduler)
        assert (await second.get("/v1/streams/a", headers={"last-event-id": "99"})).status_code == 400
        scheduler.pause_at = None
        rest = await second.get("/v1/streams/a", headers={"last-event-id": "1"})
        lines = [line for line in rest.text.splitlines() if line.startswith(("id: ", "data: "))]
        assert lines[0] == "id: 2"
        assert lines[-1] == "data: [DONE]"
        last = lines[-2].removeprefix("id: ")
        assert (await second.get("/v1/streams/a", headers={"last-event-id": last})).status_code == 204
        assert (await second.delete("/v1/streams/a")).json()["deleted"]
        assert (await second.get("/v1/streams/a")).status_code == 404
        assert (await second.delete("/v1/streams/a")).status_code == 404


async def test_a_router_that_has_gone_is_not_asked_and_its_socket_is_removed(tmp_path: Path) -> None:
    scheduler = _scheduler(tmp_path)
    async with _routers(tmp_path, scheduler) as (here, there):
        sockets = set((tmp_path / "run").iterdir())
        assert len(sockets) == 2
        assert all(each.stat().st_mode & 0o077 == 0 for each in sockets)
        assert not (await there[1].Cancel(pb.CancelRequest(request_id="a"))).cancelled
        await here[0].stop()
        async with asyncio.timeout(20):
            while len(scheduler.routers) > 1:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        assert not (await there[1].Cancel(pb.CancelRequest(request_id="a"))).cancelled
        assert len(set((tmp_path / "run").iterdir())) == 1


async def test_a_router_without_a_place_to_listen_serves_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, open_to_all = _scheduler(tmp_path), tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], runtime_dir=open_to_all) as (server, stub),
    ):
        assert "other routers do not find the streams of this one" in caplog.text
        await server.wait_ready()
        scheduler.pause_at = None
        assert len((await receive(stub.Generate(_asked("a")))).token_ids[0]) == 8


async def test_routers_of_several_machines_find_each_other_over_tcp(tmp_path: Path) -> None:
    scheduler = _scheduler(tmp_path)
    async with running_schedulers(scheduler), contextlib.AsyncExitStack() as running:
        both = [
            await running.enter_async_context(
                running_router([scheduler.address], runtime_dir=tmp_path / name, peer_host="127.0.0.1")
            )
            for name in ("a", "b")
        ]
        for server, _ in both:
            await server.wait_ready()
        await _lose_reader(both[0][1].Generate(_asked("a", detach_timeout=60)))
        received = await receive(both[1][1].Attach(pb.AttachRequest(request_id="a")), until=_has(3))
        assert len(received.token_ids[0]) == 3
