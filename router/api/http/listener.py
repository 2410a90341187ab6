"""Accepts HTTP connections: a bounded number of them, also when the process has no free file descriptor."""

import asyncio
import collections
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from uvicorn.server import ServerState

from router.api.http.connection import HEADERS_S, LINGER_S, Connection
from router.api.http.framing import CountedSocket, Framing, ReadTurns

log = logging.getLogger("octavo.router.gateway")

# Seconds in which one turn of the event loop begins to accept connections, and those that the kernel keeps meanwhile.
_ACCEPTING_S, _BACKLOG = 0.001, 2048
# No descriptor, or no memory for a socket: the connection stays in the kernel's queue.
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S, _SAY_AGAIN_S = 0.1, 60.0
# A client whose host has vanished is found after the first and three of the other times.
_KEEPALIVE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_PROBES = 30, 10, 3


@dataclass(eq=False, slots=True)
class _Place:
    """The place of one connection. connection: None while TLS is agreed on, by `task`."""

    address: str
    connection: Connection | None = None
    task: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        return self.connection is None or self.connection.is_waiting

    def give_up(self) -> None:
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Listener:
    """Listens on a socket from `start` on. uvicorn closes it as it does asyncio's servers.

    If all places are taken, a new connection gets that of the oldest one that waits for its client, of the address that
    has the most of these.
    """

    def __init__(
        self,
        listening: socket.socket,
        config: uvicorn.Config,
        state: ServerState,
        context: ssl.SSLContext | None,
        *,
        most_connections: int,
        is_overloaded: Callable[[], bool],
    ) -> None:
        self._socket, self._config, self._state, self._context = listening, config, state, context
        self._most, self._is_overloaded = most_connections, is_overloaded
        self._loop = asyncio.get_running_loop()
        self._turns = ReadTurns(self._loop)
        # In order of arrival.
        self._places: dict[_Place, None] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._silent_until = 0.0

    def __len__(self) -> int:
        """The number of connections."""
        return len(self._places)

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accepts no more connections. Those that are open stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        self._socket.close()

    async def wait_closed(self) -> None:
        """Returns at once: nothing is under way after close()."""

    # --- Accepting

    def _accept(self) -> None:
        until = time.perf_counter() + _ACCEPTING_S
        while time.perf_counter() < until:
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _SHORT_OF:
                    # The client has gone already.
                    continue
                self._make_room()
                self._rest(error)
                return
            if len(self._places) >= self._most and not self._make_room():
                accepted.close()
                self._say(f"all {self._most} HTTP connections are in use (max_connections): new ones are closed")
                continue
            self._begin(accepted, address[0])

    def _begin(self, accepted: socket.socket, address: str) -> None:
        framing, place = Framing(), _Place(address)
        counted = CountedSocket.of(accepted, framing, self._turns)
        counted.setblocking(False)
        with contextlib.suppress(OSError):
            _end_with_host(counted)
        self._places[place] = None
        place.task = self._loop.create_task(self._connect(counted, framing, place))

    async def _connect(self, counted: CountedSocket, framing: Framing, place: _Place) -> None:
        def leave(_: Connection) -> None:
            self._places.pop(place, None)
            place.connection = None

        def protocol() -> Connection:
            made = Connection(self._config, self._state, framing, is_overloaded=self._is_overloaded, on_end=leave)
            if self._context is None:
                place.connection = made
            return made

        limits = {} if self._context is None else {"ssl_handshake_timeout": HEADERS_S, "ssl_shutdown_timeout": LINGER_S}
        try:
            _, place.connection = await self._loop.connect_accepted_socket(
                protocol, counted, ssl=self._context, **limits
            )
        except OSError as error:
            # TLS errors are OSErrors as well.
            log.debug("a connection from %s was not made: %s", place.address, error)
        finally:
            place.task = None
            if place.connection is None:
                self._places.pop(place, None)
                counted.close()

    def _make_room(self) -> bool:
        """Ends a connection. False if all are computed for."""
        waiting = [place for place in self._places if place.is_waiting]
        if not waiting:
            return False
        counts = collections.Counter(place.address for place in waiting)
        address = max(counts, key=counts.__getitem__)
        oldest = next(place for place in waiting if place.address == address)
        del self._places[oldest]
        oldest.give_up()
        return True

    def _rest(self, error: OSError) -> None:
        """Accepts nothing for a moment: the event loop would try again at once, and fail again."""
        self._say(
            f"an HTTP connection can't be accepted: {error.strerror}; raise the limit of open files (`ulimit -n`, "
            "LimitNOFILE) or lower max_connections"
        )
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SAY_AGAIN_S
            log.warning("%s", what)


def _end_with_host(connected: socket.socket) -> None:
    """Has the kernel end the connection if the client's host vanishes."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if (number := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, number, value)
