"""A scheduler names the routers that have a Session with it, by which they find each other."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from protos import scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from runtime.wire import PROTOCOL_VERSION
from tests.support.scheduler.scheduling import make_options, running_scheduler


async def test_routers_are_named_while_their_sessions_last(tmp_path: Path):
    """Before the Welcome, too: a router whose replicas are loading may hold streams."""
    async with (
        running_scheduler(make_options(tmp_path)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = SchedulerStub(channel)

        async def named() -> list[str]:
            return list((await stub.Routers(scheduler_pb2.RoutersRequest())).peer_addresses)

        async def until(addresses: list[str]) -> None:
            async with asyncio.timeout(20):
                while await named() != addresses:  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.01)

        assert await named() == []
        calls = []
        for address in ("unix:b", "", "unix:a", "unix:a"):
            call = stub.Session()
            opening = scheduler_pb2.Open(protocol_version=PROTOCOL_VERSION, router_id="r", peer_address=address)
            await call.write(scheduler_pb2.RouterMessage(open=opening))
            calls.append(call)
        await until(["unix:a", "unix:b"])
        calls[0].cancel()
        calls[2].cancel()
        await until(["unix:a"])
