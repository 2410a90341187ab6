"""Bytes sent to live servers: over connections of their own, or in place of gRPC messages."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random

import grpc
import grpc.aio

from benchmarks.fuzz.edge import LONGEST_S, MessageFailed
from benchmarks.fuzz.mutation import malformed

# Messages in flight at once, and the bytes of the largest of RawMessages, which is sent up to three times.
_AT_ONCE, _LARGEST = 16, 2**23
CALLS_MIB = _AT_ONCE * 3 * _LARGEST >> 20
_ANSWER_S = 0.05


class AtOnce:
    """Messages in flight at the same time, because a message spends most of its time waiting."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[str], bytes] = {}

    async def add(self, message: bytes, feeding: Coroutine[None, None, str]) -> str:
        """Starts feeding a message. Returns the result of another one that has ended. Raises MessageFailed with the
        message that failed."""
        if len(self._tasks) >= _AT_ONCE:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        became = self._take_done()
        self._tasks[asyncio.create_task(self._in_time(feeding))] = message
        return became

    async def rest(self) -> None:
        """Waits for all messages. Raises MessageFailed."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._tasks:
            self._take_done()

    def _take_done(self) -> str:
        for task, message in self._tasks.items():
            if task.done():
                del self._tasks[task]
                if (error := task.exception()) is not None:
                    raise MessageFailed(message) from error
                return task.result()
        return "under way"

    async def _in_time(self, feeding: Coroutine[None, None, str]) -> str:
        async with asyncio.timeout(LONGEST_S):
            return await feeding


class RawSocket:
    """Connects, sends the bytes, reads a little, and disconnects; now and then it stays connected for a while."""

    _MOST_OPEN = 32

    def __init__(
        self, path_or_port: str | int, make: Callable[[Random], bytes], check: Callable[[], Awaitable[None]]
    ) -> None:
        self._where, self._make, self._check = path_or_port, make, check
        self._open: list[asyncio.StreamWriter] = []
        self._at_once = AtOnce()

    def malformed(self, random: Random) -> bytes:
        return bytes([random.randrange(8)]) + self._make(random)

    async def feed(self, message: bytes) -> str:
        return await self._at_once.add(message, self._send(message[0], message[1:]))

    async def _send(self, how: int, data: bytes) -> str:
        if isinstance(self._where, int):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._where)
        else:
            reader, writer = await asyncio.open_unix_connection(self._where)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(_ANSWER_S):
                became = "answered" if await reader.read(4096) else "closed"
        except TimeoutError:
            became = "silence"
        except ConnectionError:
            became = "reset"
        if how == 0:
            self._open.append(writer)
            if len(self._open) > self._MOST_OPEN:
                self._open.pop(0).close()
        else:
            writer.close()
        return became

    async def check(self) -> None:
        await self._at_once.rest()
        await self._check()
        for writer in self._open:
            writer.close()
        self._open.clear()


class RawMessages:
    """Bytes in the place of messages, compressed or not, for every method of a live gRPC server."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        methods: Sequence[tuple[str, tuple]],
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self._channel, self._methods, self._check = channel, methods, check
        self._at_once = AtOnce()

    def malformed(self, random: Random) -> bytes:
        which = random.randrange(len(self._methods))
        data = malformed(self._methods[which][1], random)
        if random.random() < 0.02:
            data = bytes(random.choice((2**20, _LARGEST)))
        return bytes([which, random.randrange(256)]) + data

    async def feed(self, message: bytes) -> str:
        return await self._at_once.add(message, self._call(message[0], message[1], message[2:]))

    async def _call(self, which: int, how: int, data: bytes) -> str:
        name = self._methods[which % len(self._methods)][0]
        compression = grpc.Compression.Gzip if how < 64 else None
        call = self._channel.stream_stream(name)(compression=compression, timeout=3)
        try:
            for _ in range(1 + how % 3):
                await call.write(data)
            await call.done_writing()
            async for _ in call:
                break
            call.cancel()
            return "answered"
        except asyncio.InvalidStateError:
            # The server ended the call before all messages were written.
            return (await call.code()).name.lower()
        except grpc.aio.AioRpcError as error:
            if "failed; its log" in (error.details() or ""):
                raise
            return error.code().name.lower()

    async def check(self) -> None:
        await self._at_once.rest()
        await self._check()
