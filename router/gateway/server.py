"""The HTTP server, on the event loop of the router's gRPC server."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from router.gateway.app import Gateway
from router.gateway.patience import PatientProtocol
from router.server import AddressError
from runtime.tls import TlsFiles

# What streams get to end, once they are told to.
_LAST_WORDS_S = 1


class GatewayServer:
    def __init__(
        self, gateway: Gateway, host: str, port: int, tls: TlsFiles | None = None, *, shares_port: bool = False
    ) -> None:
        """Binds. shares_port: with other processes that say so, too. Raises AddressError, TlsError."""
        context = None if tls is None else tls.server_context()
        self._socket = _bind(host, port, shares_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            gateway.app, http=PatientProtocol, log_config=None, access_log=False, lifespan="off", ws="none",
            server_header=False, timeout_graceful_shutdown=_LAST_WORDS_S,
        )  # fmt: skip
        config.load()
        config.ssl = context
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))

    def leave(self) -> None:
        """Leaves new connections to those that share the port. One that is open closes after its response."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """Signals are the router's."""

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
