"""The HTTP server, on the event loop of the gRPC server."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from router.api.gateway.app import Gateway
from router.api.http.connection import Connection
from router.api.http.listener import Listener
from router.errors import AddressError
from runtime.security.tls import TlsFiles

# Time that streams get to end once they are told to.
_LAST_WORDS_S = 1


class GatewayServer:
    def __init__(
        self,
        gateway: Gateway,
        host: str,
        port: int,
        tls: TlsFiles | None = None,
        *,
        shares_port: bool = False,
        max_connections: int = 1024,
        is_overloaded: Callable[[], bool] = lambda: False,
    ) -> None:
        """Binds. shares_port: other processes may bind the same port. max_connections: the option. is_overloaded: says
        if connections that wait for their client are to be given up. Raises AddressError, TlsError."""
        context = None if tls is None else tls.server_context()
        self._socket = _bind(host, port, shares_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            gateway.app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        config.load()
        self._gateway = gateway
        # A client's certificate proves who it is, as a key does.
        if gateway.web_pages is not None and (tls is None or tls.ca is None):
            gateway.web_pages.bind(host)
        self._server = _Server(config, self._socket, context, max_connections, is_overloaded)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        self._gateway.start()

    def leave(self) -> None:
        """Leaves new connections to the processes that share the port. Open ones close after their response."""
        self._gateway.leave()
        self._server.listener.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def stop(self) -> None:
        await self._gateway.stop()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        # They hear of it in the next turn.
        await asyncio.sleep(0)
        self._socket.close()


class _Server(uvicorn.Server):
    """Accepts connections by a Listener, and leaves signals to the router."""

    def __init__(
        self,
        config: uvicorn.Config,
        listening: socket.socket,
        context: ssl.SSLContext | None,
        max_connections: int,
        is_overloaded: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self.listener = Listener(
            listening,
            config,
            self.server_state,
            context,
            most_connections=max_connections,
            is_overloaded=is_overloaded,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        # uvicorn closes it as one of asyncio's.
        self.servers = [self.listener]  # type: ignore[list-item]
        self.listener.start()
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int, shares_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY on connections: else a body behind its headers waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
