"""max_connections bounds gRPC connections to a router (HTTP's are tested beside the listener), no ping ends one."""

import asyncio
from pathlib import Path

from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

_WAIT_S = 30.0
# HTTP/2's preface and an empty SETTINGS frame.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PING, _GOAWAY = 6, 7


async def _is_refused(port: int, opened: list[asyncio.StreamWriter]) -> bool:
    """Opens a connection. Returns True if the router closes it instead of sending its settings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    opened.append(writer)
    try:
        writer.write(_HELLO)
        async with asyncio.timeout(_WAIT_S):
            return not await reader.read(9)
    except ConnectionError:
        return True


async def test_grpc_connections_have_a_bound(tmp_path: Path) -> None:
    fake, opened = FakeScheduler(socket_address(tmp_path, "one")), list[asyncio.StreamWriter]()
    async with running_schedulers(fake), running_router([fake.address], max_connections=16) as (server, _):
        await server.wait_ready()
        refused = [await _is_refused(server.port, opened) for _ in range(24)]
        assert refused == [False] * 16 + [True] * 8
        # One that goes leaves its place.
        opened[0].close()
        async with asyncio.timeout(_WAIT_S):
            while await _is_refused(server.port, opened):
                pass
        for writer in opened:
            writer.close()


async def test_pings_are_answered_however_many(tmp_path: Path) -> None:
    fake, count = FakeScheduler(socket_address(tmp_path, "one")), 20_000
    async with (
        asyncio.timeout(_WAIT_S),
        running_schedulers(fake),
        running_router([fake.address]) as (server, _),
    ):
        await server.wait_ready()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(_HELLO + count * (bytes((0, 0, 8, _PING, 0, 0, 0, 0, 0)) + bytes(8)))
        num_answers = 0
        while num_answers < count:
            head = await reader.readexactly(9)
            assert head[3] != _GOAWAY
            num_answers += head[3] == _PING
            await reader.readexactly(int.from_bytes(head[:3]))
        writer.close()
