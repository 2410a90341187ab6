"""The relay of benchmarks.faults: it leaves no connection open behind it."""

import asyncio
import contextlib
import socket

import pytest

from benchmarks.faults.means.relay import Relay


async def _say_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_connection_that_is_being_made_as_it_ends_is_broken(turns: int) -> None:
    """turns: of the loop between the client's connection and the end."""
    async with await asyncio.start_server(_say_hello, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Relay.to(f"127.0.0.1:{port}") as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            for _ in range(turns):
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                assert await reader.read() in (b"", b"hello")
        writer.transport.abort()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", relay.port)


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_is_being_accepted_as_it_ends_is_broken(turns: int) -> None:
    relay = Relay.to("127.0.0.1:1")
    await relay.start()
    with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await relay.stop()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


async def test_it_carries_what_both_sides_send() -> None:
    async with await asyncio.start_server(_say_hello, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Relay.to(f"127.0.0.1:{port}") as relay:
            reader, writer = await asyncio.open_connection(*relay.address.split(":"))
            assert await reader.readexactly(5) == b"hello"
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
