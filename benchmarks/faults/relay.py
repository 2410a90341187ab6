"""A TCP connection that can be broken from outside: by it a client vanishes as one whose process was killed."""

import asyncio
from types import TracebackType


class Relay:
    """Passes on what comes in for `target`, HOST:PORT, until `abort`. `target`: by which it is reached itself."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self) -> None:
        """Breaks all connections, and takes no more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            onwards = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(onwards[1])
        for source, sink in ((reader, onwards[1]), (onwards[0], writer)):
            task = asyncio.create_task(_pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
    except OSError:
        # One of the two ends is gone, which the other one is to see.
        sink.transport.abort()
        return
    sink.close()
