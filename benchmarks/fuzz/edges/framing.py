"""Requests whose bytes are cut into as many pieces as have room: chunks, header lines, trailers, requests in a row."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.edges.raw import RawSocket
from benchmarks.fuzz.edges.sockets import http_port
from benchmarks.fuzz.mutation import change_bytes

_TICK_S = 0.005
_PATHS = (b"/v1/completions", b"/v1/models", b"/ping", b"/v1/files", b"/nothing", b"/v1/models/" + b"a" * 3000)
_SIZES = (1, 1, 2, 7, 64, 128, 1024, 16_384)
_MORE_HEADERS = (
    *(b"connection: upgrade\r\nupgrade: h2c\r\n", b"expect: 100-continue\r\n", b"connection: close\r\n"),
    *(b"content-type: application/json\r\n", b"trailer: a\r\n", b"a: " + b"b" * 5000 + b"\r\n", b"x:\r\n" * 40),
)


def _request(random: Random, size: int) -> bytes:
    """Returns one request of about `size` bytes."""
    head = random.choice((b"GET ", b"POST ", b"POST ", b"HEAD ")) + random.choice(_PATHS)
    head += random.choice((b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.0")) + b"\r\nhost: localhost\r\n"
    head += b"".join(each for each in _MORE_HEADERS if random.random() < 0.15)
    match random.randrange(6):
        case 0:
            return head + b"\r\n"
        case 1:
            told = random.choice((size, size + 10, max(size - 10, 0)))
            return head + b"content-length: %d\r\n\r\n" % told + b" " * size
        case 2:
            line = random.choice((b"a:\r\n", b"a: b\r\n", b"a: " + b"b" * 200 + b"\r\n"))
            return head + line * (size // len(line)) + random.choice((b"", b"\r\n"))
        case 3:
            line = b"a: b\r\n"
            return head + b"transfer-encoding: chunked\r\n\r\n0\r\n" + line * (size // len(line)) + b"\r\n"
        case _:
            length = random.choice(_SIZES)
            extension = random.choice((b"", b"", b";a=b", b";" + b"x" * 300))
            chunk = b"%x" % length + extension + b"\r\n" + b" " * length + b"\r\n"
            chunks = chunk * max(1, size // len(chunk))
            return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + random.choice((b"", b"0\r\n\r\n"))


def framed(random: Random) -> bytes:
    """Returns a connection's bytes, 128 KiB at most; some are damaged."""
    count = random.choice((1, 1, 1, 2, 5, 30))
    size = int(2 ** (17 * random.random())) // count
    data = b"".join(_request(random, size) for _ in range(count))
    return change_bytes(data, random) if random.random() < 0.2 else data


class _Framed(RawSocket):
    """Measures how long the event loop is held, too: it is the router's and the client's."""

    most_held_s = 0.0
    # Messages begun; the one that is being fed counts as a half.
    _num_fed = 0.0

    async def feed(self, message: bytes) -> str:
        self._num_fed += 0.5
        try:
            return await super().feed(message)
        finally:
            self._num_fed += 0.5

    async def tick(self) -> None:
        while True:
            since, used, fed = time.monotonic(), time.process_time(), self._num_fed
            await asyncio.sleep(_TICK_S)
            # Between two messages the fuzzer itself looks at memory.
            if fed == self._num_fed and fed % 1:
                # Time that this process did not compute went to other processes.
                held = min(time.monotonic() - since - _TICK_S, time.process_time() - used)
                self.most_held_s = max(self.most_held_s, held)


@asynccontextmanager
async def router_framing(directory: Path) -> AsyncIterator[Edge]:
    async with http_port(directory) as (port, check):
        edge = _Framed(port, framed, check)
        ticking = asyncio.create_task(edge.tick())
        try:
            yield edge
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
