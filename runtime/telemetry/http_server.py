"""Serves /metrics and /health of a process, over plain HTTP on daemon threads.

Nothing that a client does or leaves undone keeps others waiting: a request has one deadline from its connection on, and
if all places are taken, the oldest connection of the address that has the most is closed for a new one.
"""

import collections
import contextlib
import errno
import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from runtime.security.hosts import Hosts, is_loopback

log = logging.getLogger("octavo.http")


# Connections served at once, seconds from connection to the last byte of the response, and bytes of a request: normally
# they are few, short and small.
_MOST_CONNECTIONS = 64
_REQUEST_S = 5.0
_REQUEST_BYTES = 64 * 1024
# Connections that the kernel accepts meanwhile; a client waits a second if there is no room.
_BACKLOG = 128
# Pause after an accept that found no free file descriptor. The connection keeps waiting in the kernel until one of ours
# is closed.
_NO_DESCRIPTOR_S = 0.01


class _Connection(io.RawIOBase):
    """The bytes of one connection: those of the request and of the response."""

    def __init__(self, connected: socket.socket, address: str) -> None:
        self.address = address
        self._socket = connected
        self._deadline = time.monotonic() + _REQUEST_S
        self._bytes_left = _REQUEST_BYTES
        # Waits for the client, and can be closed. Otherwise its thread computes the response.
        self.is_waiting = True

    def give_up(self) -> None:
        """Ends the connection, from another thread than its own."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._waiting(), memoryview(buffer) as view:
            count = self._socket.recv_into(view[: self._bytes_left])
        self._bytes_left -= count
        return count

    def write(self, data: Any) -> int:
        with self._waiting():
            self._socket.sendall(data)
        return len(data)

    @contextlib.contextmanager
    def _waiting(self):
        """Waits for the client inside. Raises ConnectionAbortedError after the deadline."""
        self.is_waiting = True
        try:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            yield
        except TimeoutError:
            # wsgiref knows this one as the client's fault, and is silent.
            raise ConnectionAbortedError(f"the request took longer than {_REQUEST_S:g} s") from None
        finally:
            self.is_waiting = False


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per connection, and at most _MOST_CONNECTIONS at once. Accepting never waits."""

    daemon_threads = True
    # Reuses the port of a predecessor in TIME_WAIT; a port with a listener is still an error.
    allow_reuse_address = True
    request_queue_size = _BACKLOG

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        # In order of arrival.
        self._connections: dict[socket.socket, _Connection] = {}
        super().__init__(*arguments)

    def connection(self, connected: socket.socket) -> _Connection | None:
        """The connection of a socket; None if it had to make room."""
        with self._lock:
            return self._connections.get(connected)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
                time.sleep(_NO_DESCRIPTOR_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Takes a place for a connection. False if all are taken by responses that are being computed."""
        if len(self._connections) >= _MOST_CONNECTIONS and not self._make_room():
            return False
        with self._lock:
            self._connections[request] = _Connection(request, client_address[0])
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of %s to /metrics or /health broke", client_address, exc_info=True)

    def _make_room(self) -> bool:
        """Closes the oldest connection that waits for its client, of the address that has the most of them."""
        with self._lock:
            waiting = {at: each for at, each in self._connections.items() if each.is_waiting}
            if not waiting:
                return False
            counts = collections.Counter(each.address for each in waiting.values())
            # Not most_common: it imports, which takes a descriptor.
            address = max(counts, key=counts.__getitem__)
            oldest = next(at for at, each in waiting.items() if each.address == address)
            # Its thread closes it; it can't do that before this lock is free.
            self._connections.pop(oldest).give_up()
            return True


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        assert isinstance(self.server, _Server)
        connection = self.server.connection(self.request)
        if connection is None:
            raise ConnectionAbortedError("it made room for others")
        self.connection = self.request
        self.rfile = io.BufferedReader(connection)
        self.wfile = connection  # type: ignore[assignment] (without a buffer, as its default)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: scrapes are no news."""


class ObservabilityServer:
    """Serves GET /metrics (Prometheus text) and GET /health (200 or 503, with a line that gives the reason)."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], tuple[bool, str]]
    ) -> None:
        """port: 0 picks a free one. health: called for each request, on the server's thread.

        Raises OSError if the port is taken.
        """
        metrics = make_wsgi_app(registry)
        # At other addresses, names are those of the network.
        hosts = Hosts(host) if is_loopback(host) else None

        def app(environ, start_response):
            path = environ.get("PATH_INFO", "/")
            try:
                if hosts is not None and not hosts.allows(environ.get("HTTP_HOST") or "localhost"):
                    status, text = "403 Forbidden", f"Host={environ['HTTP_HOST'][:80]!r}: use {hosts}, or metrics_host"
                elif path == "/metrics":
                    return metrics(environ, start_response)
                elif path == "/health":
                    healthy, text = health()
                    status = "200 OK" if healthy else "503 Service Unavailable"
                else:
                    status, text = "404 Not Found", "only /metrics and /health are served here"
            except Exception:
                log.exception("cannot show %s", path)
                status, text = "500 Internal Server Error", "the log of this process has the cause"
            body = (text + "\n").encode()
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
            return [body]

        self._server = make_server(host, port, app, server_class=_Server, handler_class=_Handler)
        # The poll interval only bounds the time that stop() takes where it can't wake the thread.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(2.0,), name="http", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        # Wakes its thread, on Linux.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
