"""A router asks all of its replicas: one answer is enough, and dead replicas cause no wait."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer, AdminStub, add_AdminServicer_to_server
from router.api.admin_service import AdminService
from router.api.observer import Observer
from router.api.operator import Operator
from router.intake.live import LiveRequests
from router.replicas.peers import Peers
from router.streams.migrations import Migrations
from router.streams.placement import Dispatcher
from router.streams.registry import StreamRegistry
from router.telemetry.metrics import RouterMetrics
from tests.support.ports import free_port
from tests.support.replicas import replica_set


class FakeAdmin(AdminServicer):
    """A replica that knows the requests in `ages`: how many seconds ago each began, by name."""

    def __init__(self, replica_id: str, ages: dict[str, float], num_blocks: int) -> None:
        self.replica_id, self.ages, self.num_blocks = replica_id, ages, num_blocks

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainResponse:
        if request.request_id not in self.ages:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        age = self.ages[request.request_id]
        timeline = pb.RequestTimeline(request_id=request.request_id, replica_id=self.replica_id, now=age)
        return pb.ExplainResponse(timelines=[timeline])

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(num_blocks=self.num_blocks)


@contextlib.asynccontextmanager
async def serving(servicer: AdminServicer, address: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    add_AdminServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def router_of(directory: Path, *addresses: str | None) -> AsyncIterator[Any]:
    """A stub for the Admin service of a router with replicas at these addresses; None: one not connected yet."""
    async with contextlib.AsyncExitStack() as stack:
        metrics = RouterMetrics()
        replicas, streams = (
            replica_set([address or "unix:new" for address in addresses], metrics),
            StreamRegistry(metrics),
        )
        for replica, address in zip(replicas.replicas, addresses, strict=True):
            if address:
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
                replica._connection.channel = channel
        migrations = Migrations(replicas, Dispatcher(replicas, metrics), metrics)
        live = LiveRequests(streams, migrations, replicas.replicas, Peers(()))
        service = AdminService(Operator(replicas.replicas, live), Observer("m", replicas, streams, metrics))
        own = f"unix:{directory}/router.sock"
        await stack.enter_async_context(serving(service, own))
        yield AdminStub(await stack.enter_async_context(grpc.aio.insecure_channel(own)))


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """Addresses of two replicas: one knows `moved` and `old`, the other `moved`."""
    addresses = f"unix:{tmp_path}/0.sock", f"unix:{tmp_path}/1.sock"
    first, second = FakeAdmin("0", {"moved": 2.5, "old": 9.0}, 3), FakeAdmin("1", {"moved": 7.0}, 4)
    async with serving(first, addresses[0]), serving(second, addresses[1]):
        yield addresses


def dead() -> str:
    return f"127.0.0.1:{free_port()}"


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_the_answers_of_all_replicas_come_oldest_first(tmp_path: Path, two: tuple[str, str]) -> None:
    async with router_of(tmp_path, *two) as stub:
        answer = await stub.Explain(pb.ExplainRequest(request_id="moved"))
        assert [(each.replica_id, each.now) for each in answer.timelines] == [("1", 7.0), ("0", 2.5)]
        assert not answer.unreachable
        assert len((await stub.Explain(pb.ExplainRequest(request_id="old"))).timelines) == 1
        assert (await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_blocks == 7


async def test_replicas_that_cannot_be_asked_are_named_and_cost_no_more(tmp_path: Path, two: tuple[str, str]) -> None:
    lost = dead()
    async with router_of(tmp_path, *two, lost, None) as stub:
        answer = await stub.Explain(pb.ExplainRequest(request_id="old"))
        assert [each.replica_id for each in answer.timelines] == ["0"]
        assert [cause.split(" ")[0] for cause in answer.unreachable] == [f"{lost}:", "unix:new:"]
        reset = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert (reset.num_blocks, len(reset.unreachable)) == (7, 2)
        # The lost replica might have known it: the answer says so.
        code, details = await status_of(stub.Explain(pb.ExplainRequest(request_id="nobody's")))
        assert code is grpc.StatusCode.NOT_FOUND
        assert '"nobody\'s"' in details
        assert lost in details


async def test_without_any_answer_the_call_fails_with_every_cause(tmp_path: Path) -> None:
    lost = dead()
    async with router_of(tmp_path, lost, None) as stub:
        for call in (
            stub.Explain(pb.ExplainRequest(request_id="a")),
            stub.ResetPrefixCache(pb.ResetPrefixCacheRequest()),
        ):
            code, details = await status_of(call)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert lost in details
            assert "unix:new: not connected yet" in details


async def test_no_name_is_no_question(tmp_path: Path, two: tuple[str, str]) -> None:
    async with router_of(tmp_path, *two) as stub:
        code, details = await status_of(stub.Explain(pb.ExplainRequest()))
        assert (code, details.split(" ")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
        code, _ = await status_of(stub.Migrate(pb.MigrateRequest()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_replica_is_held_by_its_address(tmp_path: Path, two: tuple[str, str]) -> None:
    async with router_of(tmp_path, *two) as stub:
        paused = pb.HoldRequest(replica=two[0], state=pb.HOLD_STATE_PAUSED)
        assert (await stub.Hold(paused)).before == pb.HOLD_STATE_NONE
        assert (await stub.Hold(paused)).before == pb.HOLD_STATE_PAUSED
        code, details = await status_of(stub.Hold(pb.HoldRequest(replica="elsewhere", state=pb.HOLD_STATE_PAUSED)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert two[1] in details
