"""The HTTP server, on the event loop of the gRPC server, with time limits for slow clients."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.api.gateway.app import Gateway
from router.errors import AddressError
from runtime.security.tls import TlsFiles

# Time for a request's headers, from the connection or the end of the previous response.
HEADERS_S = 20.0


class TimeLimitedProtocol(H11Protocol):
    """uvicorn's own protocol, with a time limit for headers, which it lacks."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        # A response may still be under way, with a request behind it.
        if self.conn.our_state in (h11.IDLE, h11.DONE):
            self.transport.close()
        else:
            self._await_headers()


# Time that streams get to end once they are told to.
_LAST_WORDS_S = 1


class GatewayServer:
    def __init__(
        self, gateway: Gateway, host: str, port: int, tls: TlsFiles | None = None, *, shares_port: bool = False
    ) -> None:
        """Binds. shares_port: other processes may bind the same port. Raises AddressError, TlsError."""
        context = None if tls is None else tls.server_context()
        self._socket = _bind(host, port, shares_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            gateway.app, http=TimeLimitedProtocol, log_config=None, access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=_LAST_WORDS_S,
        )  # fmt: skip
        config.load()
        self._gateway = gateway
        config.ssl = context
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        self._gateway.start()

    def leave(self) -> None:
        """Leaves new connections to the processes that share the port. Open ones close after their response."""
        self._gateway.leave()
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        await self._gateway.stop()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int, shares_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise AddressError(
            f"can't listen on host={host!r}, http_port={port}: {error.strerror or error}; choose another port, or 0 "
            f"for no HTTP"
        ) from None
    return listening
