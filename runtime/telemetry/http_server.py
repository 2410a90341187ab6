"""Serves /metrics and /health of a process, over plain HTTP on a daemon thread."""

import logging
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger("octavo.http")


# Connections served at once, and seconds that each may take to send its request: normally they are few and short.
_MOST_CONNECTIONS = 64
_REQUEST_S = 5.0


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per connection, and at most _MOST_CONNECTIONS at once."""

    daemon_threads = True
    # Reuses the port of a predecessor in TIME_WAIT; a port with a listener is still an error.
    allow_reuse_address = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of %s to /metrics or /health broke", client_address, exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    timeout = _REQUEST_S

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

        def app(environ, start_response):
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                return metrics(environ, start_response)
            if path == "/health":
                healthy, text = health()
                status = "200 OK" if healthy else "503 Service Unavailable"
            else:
                status, text = "404 Not Found", "only /metrics and /health are served here"
            body = (text + "\n").encode()
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
            return [body]

        self._server = make_server(host, port, app, server_class=_Server, handler_class=_QuietHandler)
        # The poll interval only bounds the time that stop() takes; each wake-up costs an idle process some CPU.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(2.0,), name="http", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
