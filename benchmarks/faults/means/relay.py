"""A relay between two processes over tcp that can delay, hold, reset and forget what passes through it."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

_RESET = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 65_536
_STOP_TIMEOUT_S = 10.0
# From an accepted connection to its task.
_TURNS = 4


class Way:
    """One direction of all connections of a relay. pause: seconds to hold the next bytes for. Bytes that are held stop
    those behind them, as with TCP."""

    def __init__(self) -> None:
        self.pause: Callable[[], float] = _no_pause
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Lets nothing pass until `release`."""
        self._open.clear()

    def release(self) -> None:
        self.pause = _no_pause
        self._open.set()

    async def pass_through(self) -> None:
        """Waits as long as the next bytes have to."""
        if seconds := self.pause():
            await asyncio.sleep(seconds)
        await self._open.wait()


def _no_pause() -> float:
    return 0.0


class _Connection:
    def __init__(self, dialer: asyncio.StreamWriter, listener: asyncio.StreamWriter) -> None:
        self.dialer, self.listener = dialer, listener
        # The side that still lives after the other one was forgotten.
        self.left: asyncio.StreamWriter | None = None


class Relay:
    """Connections from a port to another one, both on loopback. All methods are called on the thread of its loop.
    Entering and leaving its context starts and stops it.

    to_listener, to_dialer: the two directions. The dialer is the side that connects: a router, a worker or a client.
    """

    def __init__(self, port: int, target: int) -> None:
        """port: 0 for a free one."""
        self.port, self._target = port, target
        self.to_listener, self.to_dialer = Way(), Way()
        self._connections: set[_Connection] = set()
        # One for each connection, from its first moment on.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    @classmethod
    def to(cls, target: str) -> "Relay":
        """A relay from a free port to HOST:PORT on loopback."""
        return cls(0, int(target.rpartition(":")[2]))

    @property
    def address(self) -> str:
        """HOST:PORT, once it has started."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Relay":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Breaks all connections, and waits until they are gone."""
        self.end()
        # Connections that were just accepted reach `_connect` some turns of the loop later.
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Transports close in the loop's next turn.
        await asyncio.sleep(0)

    def end(self) -> None:
        """Resets all connections, and accepts no more."""
        self._is_over = True
        # Python 3.11 leaves a connection open that was accepted in the turn of the loop in which the server closes.
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        loop.call_soon(self._server.close)
        for way in (self.to_listener, self.to_dialer):
            way.release()
        self.reset()

    def reset(self) -> None:
        """Resets all connections. The relay goes on accepting new ones."""
        for each in list(self._connections):
            for writer in (each.dialer, each.listener):
                _reset(writer)

    def forget_one_side(self, *, keep_dialer: bool) -> None:
        """Resets one side of each connection; the other one stays open, and what it sends is dropped."""
        for each in list(self._connections):
            if each.left is None:
                each.left = each.dialer if keep_dialer else each.listener
                _reset(each.listener if keep_dialer else each.dialer)

    @property
    def num_half_open(self) -> int:
        """The connections whose remaining side has not noticed yet."""
        return sum(each.left is not None for each in self._connections)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._is_over:
                onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target)
                await self._join(reader, writer, onward_reader, onward)
        except OSError:
            # There is nobody at the target.
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        onward_reader: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
    ) -> None:
        """Carries both directions until they end."""
        connection = _Connection(writer, onward)
        self._connections.add(connection)
        try:
            # It may have ended while the connection was made.
            if not self._is_over:
                await asyncio.gather(
                    self._carry(connection, reader, onward, self.to_listener),
                    self._carry(connection, onward_reader, writer, self.to_dialer),
                )
        finally:
            self._connections.discard(connection)
            onward.transport.abort()

    async def _carry(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        """Carries one direction until its source ends. If the other side was forgotten, reads on and drops."""
        try:
            while piece := await reader.read(_CHUNK_BYTES):
                await way.pass_through()
                if connection.left is None:
                    writer.write(piece)
                    await writer.drain()
            await way.pass_through()
        except OSError:
            pass
        # The remaining side of a half-open connection ends by itself; a forgotten one does not end the other.
        if connection.left is not writer:
            writer.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    connected = writer.get_extra_info("socket")
    if connected is not None and connected.fileno() >= 0:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Relays:
    """Relays on a thread of their own. Leaving the context ends them."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """pairs: the port and the target port of each relay."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self.all = [Relay(port, target) for port, target in pairs]

    def __enter__(self) -> "Relays":
        self._thread.start()
        for relay in self.all:
            asyncio.run_coroutine_threadsafe(relay.start(), self._loop).result(_STOP_TIMEOUT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for relay in self.all:
            asyncio.run_coroutine_threadsafe(relay.stop(), self._loop).result(_STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        self._loop.close()

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function on the relays' thread, soon."""
        self._loop.call_soon_threadsafe(function)


def pause_evenly(choose: random.Random, least: float, most: float) -> Callable[[], float]:
    """Pauses that delay all bytes."""
    return lambda: choose.uniform(least, most)


def pause_now_and_then(choose: random.Random, chance: float, least: float, most: float) -> Callable[[], float]:
    """Pauses as after a lost packet: few, and as long as TCP waits before it sends again."""
    return lambda: choose.uniform(least, most) if choose.random() < chance else 0.0
