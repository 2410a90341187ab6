"""A small application behind the router's HTTP server, and raw connections to it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from router.api.gateway.server import GatewayServer

WAIT_S = 30.0
# Bytes of /large.
LARGE = 8_000_000


class Application:
    """Counts what reaches the application."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.web_pages = None
        self.held, self._holding = asyncio.Event(), asyncio.Semaphore(0)
        self.app = Starlette(
            routes=[
                Route("/size", self._size, methods=["POST"]),
                Route("/ping", self._ping, methods=["GET", "POST"]),
                Route("/hold", self._hold),
                Route("/large", self._large),
            ]
        )

    def start(self) -> None: ...
    def leave(self) -> None: ...
    async def stop(self) -> None: ...

    async def begun(self, count: int) -> None:
        """Waits until so many requests have come that are held."""
        async with asyncio.timeout(WAIT_S):
            for _ in range(count):
                await self._holding.acquire()

    async def _size(self, request: Request) -> Response:
        self.num_requests += 1
        size = 0
        async for part in request.stream():
            size += len(part)
        return PlainTextResponse(str(size))

    async def _ping(self, request: Request) -> Response:
        self.num_requests += 1
        return PlainTextResponse("pong")

    async def _hold(self, request: Request) -> Response:
        self.num_requests += 1
        self._holding.release()
        await self.held.wait()
        return PlainTextResponse("held")

    async def _large(self, request: Request) -> Response:
        self.num_requests += 1

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield bytes(LARGE // 64)

        return StreamingResponse(parts())


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Application, int]]:
    gateway = Application()
    server = GatewayServer(gateway, "127.0.0.1", 0, **options)  # type: ignore[arg-type]
    server.start()
    # The listener starts with its task.
    await asyncio.sleep(0)
    try:
        yield gateway, server.port
    finally:
        gateway.held.set()
        await server.stop()


async def sent(port: int, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Returns everything that the server answers, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        for part in parts:
            writer.write(part)
        return await to_end(reader)
    finally:
        writer.close()


async def to_end(reader: asyncio.StreamReader) -> bytes:
    got = b""
    async with asyncio.timeout(WAIT_S):
        # A reset is an end, too.
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := await reader.read(65_536):
                got += part
    return got


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Returns the next answer, with its body."""
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length"))
        return head + await reader.readexactly(int(length))
