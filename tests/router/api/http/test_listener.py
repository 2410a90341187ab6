"""router.api.http.listener: how many HTTP connections there are, and which of them make room. Real sockets."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from router.api.http import listener
from tests.support.http_connections import WAIT_S, sent, serving, to_end


async def test_the_kernel_ends_connections_whose_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    real = listener._end_with_host

    def look(accepted: socket.socket) -> None:
        real(accepted)
        is_on = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found.append((is_on, accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)))

    monkeypatch.setattr(listener, "_end_with_host", look)
    async with serving() as (_, port):
        await sent(port, b"GET /ping HTTP/1.0\r\n\r\n")
    assert found == [(1, listener._KEEPALIVE_S)]


async def test_a_connection_that_waits_makes_room_for_a_new_one() -> None:
    async with serving(max_connections=4) as (gateway, port):
        computing, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /hold HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        await gateway.begun(1)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        # From another address, which has fewer.
        other, other_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        assert await to_end(idle[0][0]) == b""
        other_writer.write(b"GET /ping HTTP/1.0\r\n\r\n")
        assert (await to_end(other)).endswith(b"pong")
        gateway.held.set()
        assert (await to_end(computing)).endswith(b"held")
        for _, each in (*idle, (None, writer), (None, other_writer)):
            each.close()


async def test_connections_that_are_computed_for_stay(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(max_connections=2) as (gateway, port):
        held = [asyncio.create_task(sent(port, b"GET /hold HTTP/1.0\r\n\r\n")) for _ in range(2)]
        await gateway.begun(2)
        for _ in range(3):
            assert await sent(port, b"GET /ping HTTP/1.0\r\n\r\n") == b""
        gateway.held.set()
        assert all(answer.endswith(b"held") for answer in await asyncio.gather(*held))
    assert caplog.text.count("all 2 HTTP connections are in use (max_connections)") == 1


async def test_without_descriptors_a_waiting_connection_makes_room_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (_, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with asyncio.timeout(WAIT_S):
            # The last one is accepted only then.
            while b"pong" not in await sent(port, b"GET /ping HTTP/1.0\r\n\r\n"):
                pass
        short = 3
        real = socket.socket.accept

        def accept(self: socket.socket) -> Any:
            nonlocal short
            if short:
                short -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real(self)

        monkeypatch.setattr(socket.socket, "accept", accept)
        assert (await sent(port, b"GET /ping HTTP/1.0\r\n\r\n")).endswith(b"pong")
        assert [await to_end(reader) for reader, _ in idle] == [b""] * 3
        for _, writer in idle:
            writer.close()
    assert caplog.text.count("can't be accepted: Too many open files") == 1
    assert "Traceback" not in caplog.text


# --- Overload


async def test_an_overloaded_router_gives_up_connections_that_wait_and_keeps_the_others() -> None:
    overloaded = False
    async with serving(is_overloaded=lambda: overloaded) as (gateway, port):
        held = asyncio.create_task(sent(port, b"GET /hold HTTP/1.0\r\n\r\n"))
        await gateway.begun(1)
        overloaded = True
        assert await sent(port, b"GET /ping HTTP/1.0\r\n\r\n") == b""
        overloaded = False
        assert (await sent(port, b"GET /ping HTTP/1.0\r\n\r\n")).endswith(b"pong")
        gateway.held.set()
        assert (await held).endswith(b"held")
        assert gateway.num_requests == 2
