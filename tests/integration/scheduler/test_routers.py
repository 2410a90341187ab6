"""A scheduler names the routers that have a Session with it, by which they find each other, and logs them."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos import scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from runtime.wire import PROTOCOL_VERSION
from tests.support.scheduler.scheduling import TIMEOUT, RouterEnd, make_options, running_scheduler, running_worker


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


async def test_the_log_says_once_that_a_router_waits_for_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "octavo.scheduler")

    def levels(words: str) -> list[int]:
        return [record.levelno for record in caplog.records if words in record.getMessage()]

    async def until(words: str, count: int) -> None:
        async with asyncio.timeout(TIMEOUT):
            while len(levels(words)) < count:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)

    options = make_options(tmp_path)
    async with running_scheduler(options) as server:
        for count in (1, 2, 3):
            async with RouterEnd(server.address):
                await until("has opened Session", count)
            await until("with router test has ended", count)
        async with RouterEnd(server.address) as router:
            await until("has opened Session", 4)
            async with running_worker(options):
                await router.wait_for(lambda: router.welcomes)
                async with RouterEnd(server.address) as other:
                    await other.wait_for(lambda: other.welcomes)
                await until("with router test has ended", 4)
    assert levels("has opened Session") == [logging.INFO, *[logging.DEBUG] * 3, logging.INFO]
    assert levels("with router test has ended")[:4] == [*[logging.DEBUG] * 3, logging.INFO]
