"""Cancel and Migrate mean the newest attempt of a request, wherever it is. Two routers over fake schedulers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import admin_pb2
from protos import inference_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from router.server import RouterServer
from tests.fakes.routers import Received, receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

# A router and a stub for it.
Router = tuple[RouterServer, Any]
TIMEOUT = 30.0


class Resumed:
    """A request whose client has lost the way to the first router, which has not noticed, and has resumed at the second
    one: each attempt is at a replica of its own, so no scheduler supersedes the older one."""

    def __init__(self, first: Router, second: Router, replicas: dict[str, FakeScheduler]) -> None:
        self.first, self.second, self.replicas = first, second, replicas
        self.stale: Any = None
        self.live: Any = None
        # The replica of the newest attempt.
        self.there = ""

    async def begin(self) -> "Resumed":
        self.stale = self.first[1].Generate(_asked("a"))
        received = await receive(self.stale, until=_has_tokens)
        here = next(address for address, replica in self.replicas.items() if replica.num_live)
        self.there = next(address for address in self.replicas if address != here)
        await _hold(self.second, here)
        resume = received.resume_request()
        received.begin_again()
        self.live = self.second[1].Generate(resume)
        await receive(self.live, into=received, until=lambda received: received.started is not None)
        # The router says Started before the replica has the request.
        await self.replicas[self.there].wait_until(lambda replica: replica.num_live == 1)
        assert self.replicas[here].num_live == 1
        return self


async def _hold(router: Router, replica: str) -> None:
    """Has a router send nothing to a replica."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router[0].port}") as channel:
        admin: Any = AdminStub(channel)
        await admin.Hold(admin_pb2.HoldRequest(replica=replica, state=admin_pb2.HOLD_STATE_PAUSED))


@contextlib.asynccontextmanager
async def _cluster(directory: Path, num_routers: int = 2) -> AsyncIterator[tuple[list[Router], list[FakeScheduler]]]:
    schedulers = [FakeScheduler(socket_address(directory, name), pause_at=3) for name in ("one", "two")]
    addresses = [scheduler.address for scheduler in schedulers]
    async with contextlib.AsyncExitStack() as running:
        await running.enter_async_context(running_schedulers(*schedulers))
        options: dict[str, Any] = {"runtime_dir": directory / "run"}
        routers = [await running.enter_async_context(running_router(addresses, **options)) for _ in range(num_routers)]
        for server, _ in routers:
            await server.wait_ready()
        async with asyncio.timeout(TIMEOUT):
            yield routers, schedulers


@contextlib.asynccontextmanager
async def _resumed(directory: Path) -> AsyncIterator[Resumed]:
    async with _cluster(directory) as ((first, second), schedulers):
        yield await Resumed(first, second, {each.address: each for each in schedulers}).begin()


def _asked(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id, prompt="Once upon", sampling=pb.SamplingParams(max_tokens=8, seed=7)
    )


def _has_tokens(received: Received) -> bool:
    return len(received.token_ids.get(0, ())) >= 3


async def _cancel(router: Router, request_id: str = "a") -> pb.CancelResponse:
    return await router[1].Cancel(pb.CancelRequest(request_id=request_id))


@pytest.mark.parametrize("asked", ["first", "second"])
async def test_cancel_ends_every_attempt_whichever_router_is_asked(tmp_path: Path, asked: str) -> None:
    """Before, the first router confirmed the end of its stale attempt, and the client's stream went on."""
    async with _resumed(tmp_path) as it:
        assert await _cancel(getattr(it, asked)) == pb.CancelResponse(cancelled=True, attempt=1)
        for call in (it.live, it.stale):
            assert await call.code() is grpc.StatusCode.CANCELLED
        assert not (await _cancel(getattr(it, asked))).cancelled
        for replica in it.replicas.values():
            await replica.wait_until(lambda replica: not replica.num_live)


async def test_cancel_reaches_the_newest_attempt_at_a_router_that_cannot_be_asked(tmp_path: Path) -> None:
    """Its replica tells it."""
    async with _resumed(tmp_path) as it:
        await it.second[0]._peer_server.stop()
        assert await _cancel(it.first) == pb.CancelResponse(cancelled=True, attempt=1)
        assert await it.live.code() is grpc.StatusCode.CANCELLED


async def test_migrate_moves_the_newest_attempt(tmp_path: Path) -> None:
    """Before, the router that was asked moved its stale attempt."""
    async with (
        _resumed(tmp_path) as it,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.first[0].port}") as channel,
    ):
        admin: Any = AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no other replica is not ready") as caught:
            await admin.Migrate(admin_pb2.MigrateRequest(request_id="a"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "there the other replica is held back"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{it.second[0].port}") as other:
            held: Any = AdminStub(other)
            for address in it.replicas:
                await held.Hold(admin_pb2.HoldRequest(replica=address, state=admin_pb2.HOLD_STATE_NONE))
        moved = await admin.Migrate(admin_pb2.MigrateRequest(request_id="a"))
        assert moved.moved_from == it.there
        for address, replica in it.replicas.items():
            count = 0 if address == it.there else 2
            await replica.wait_until(lambda replica, count=count: replica.num_live == count)


async def test_a_router_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    async with _cluster(tmp_path, num_routers=1) as ((router,), schedulers):
        call = router[1].Generate(_asked("a"))
        await receive(call, until=_has_tokens)
        assert (await _cancel(router)).cancelled
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert [scheduler.num_asked for scheduler in schedulers] == [0, 0]
        assert not (await _cancel(router, "nobody")).cancelled
        assert [scheduler.num_asked for scheduler in schedulers] == [1, 1]


def _held_up(router: Router) -> asyncio.Event:
    """Has a router prepare requests for ever. Returns an event that is set once it does."""
    began = asyncio.Event()

    async def prepare(*_: Any) -> Any:
        began.set()
        await asyncio.Event().wait()

    router[0].intake._prepare = prepare  # type: ignore[method-assign]
    return began


Asked = Callable[[Router, Router], Router]
WHERE = pytest.mark.parametrize("asked", [lambda here, there: here, lambda here, there: there], ids=["here", "there"])


@WHERE
async def test_cancel_finds_a_request_that_is_being_prepared(tmp_path: Path, asked: Asked) -> None:
    """Before, it answered false, and the request was computed to its end."""
    async with _cluster(tmp_path) as ((here, there), schedulers):
        began = _held_up(here)
        call = here[1].Generate(_asked("a"))
        await began.wait()
        assert (await _cancel(asked(here, there))).cancelled
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert await call.details() == "Cancel was called for this request"
        assert not (await _cancel(asked(here, there))).cancelled
        assert not any(scheduler.submitted for scheduler in schedulers)


@WHERE
async def test_cancel_ends_a_resume_that_is_under_way(tmp_path: Path, asked: Asked) -> None:
    async with _cluster(tmp_path) as ((here, there), schedulers):
        stale = here[1].Generate(_asked("a"))
        received = await receive(stale, until=_has_tokens)
        began = _held_up(there)
        resume = there[1].Generate(received.resume_request())
        await began.wait()
        assert await _cancel(asked(here, there)) == pb.CancelResponse(cancelled=True, attempt=1)
        for call in (stale, resume):
            assert await call.code() is grpc.StatusCode.CANCELLED
        for scheduler in schedulers:
            await scheduler.wait_until(lambda scheduler: not scheduler.num_live)


async def test_a_client_that_leaves_while_its_request_is_prepared_is_no_cancel(tmp_path: Path) -> None:
    async with _cluster(tmp_path, num_routers=1) as ((router,), _):
        began = _held_up(router)
        call = router[1].Generate(_asked("a"))
        await began.wait()
        call.cancel()
        registry: Any = router[0].streams
        while registry._preparing:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)
        assert not (await _cancel(router)).cancelled
