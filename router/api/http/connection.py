"""One HTTP/1.1 connection: uvicorn's, whose parser is llhttp (C), with bounds on what a client sends or leaves undone.

While nothing is computed for a connection, exactly one timer runs: for the next request, or for an answer that nobody
reads. While something is, its own limits hold: the body's (reading/bodies.py), and those of streams.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api.http.framing import PIECES_A_REQUEST, AbsurdFraming, Framing
from router.streams import outbox

# Time for a request's headers, from the connection or the end of the previous response.
HEADERS_S = 20.0
# Time for the rest of a body that its answer did not wait for: closing at once would reset the connection, and the
# client might lose the answer.
LINGER_S = 2.0
# Bytes of a request beside its body may be as many as those of the body, and so many more: the request line, headers,
# what frames chunks, and trailers. And so many header lines.
MOST_OTHER_BYTES, MOST_HEADERS = 65_536, 256
# Requests that a client may send before it has the answer to the first one.
MOST_PIPELINED = 8
# Streams give up clients that read nothing by themselves, a little earlier, and say so.
_LATER_S = 5.0


class _Refused(Exception):
    """Raised within the parser for what is not taken."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        framing: Framing,
        *,
        is_overloaded: Callable[[], bool],
        on_end: Callable[["Connection"], None],
    ) -> None:
        """is_overloaded: says if connections that wait for their client are to be given up. on_end: called once."""
        super().__init__(config, state, {})
        self._application, self.app = self.app, self._answer
        self._framing, self._is_overloaded, self._on_end = framing, is_overloaded, on_end
        self._timer: asyncio.TimerHandle | None = None
        # Bytes that wait to be sent, when they were looked at last.
        self._num_unsent: float = 0
        # Counts for the request that is being parsed.
        self._num_bytes = self._num_body_bytes = self._num_headers = 0
        # A body that nobody wants is awaited: set at its end, or the connection's.
        self._lingering: asyncio.Event | None = None
        # Refused: what comes is dropped.
        self._is_over = False
        # The parser is told of a request that has begun: nothing is to happen.
        self._is_told = False

    @property
    def is_waiting(self) -> bool:
        """True if nothing is computed: for its next request, the rest of a request, or its end the client must act."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    # --- What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._lingering is not None:
            self._lingering.set()
        self._on_end(self)
        # These refer back to the connection. Such circles would stay until a collection of all garbage, which holds
        # the event loop: 0.1 s after some hundred refused connections.
        self.pipeline.clear()
        self.cycle, self.app = None, self._application  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._is_over or self.transport.is_closing():
            return
        if self.is_waiting and self._is_overloaded():
            self.transport.abort()
            return
        self._unset_keepalive_if_required()
        try:
            # The socket has counted the read.
            self._framing.add(0)
            self._num_bytes += len(data)
            while data:
                data = self._parse(data)
            if self._num_bytes - 2 * self._num_body_bytes > MOST_OTHER_BYTES:
                raise _Refused(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"the request has {self._num_bytes} bytes, its body {self._num_body_bytes}: header lines and "
                    f"framing may have as many as the body and {MOST_OTHER_BYTES} more",
                )
        except AbsurdFraming as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except _Refused as error:
            self._refuse(error.status, str(error))
        except httptools.HttpParserError as error:
            if isinstance(cause := error.__context__, _Refused):
                self._refuse(cause.status, str(cause))
            elif isinstance(cause, AbsurdFraming):
                self._refuse(HTTPStatus.BAD_REQUEST, str(cause))
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, f"this is not an HTTP/1.1 request: {error}")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()
        if self.is_waiting:
            self._await_request()

    def shutdown(self) -> None:
        if self._is_over:
            self.transport.abort()
        else:
            super().shutdown()

    # --- What the parser calls

    def on_message_begin(self) -> None:
        if self._is_told:
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, f"more than {MOST_PIPELINED} requests wait on this connection")
        self._num_bytes = self._num_body_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_told:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_told:
            return
        # Trailers come here, too.
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            raise _Refused(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the request has more than {MOST_HEADERS} header lines"
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_told:
            self._framing.add(-PIECES_A_REQUEST)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing.add(1)
        self._num_body_bytes += len(body)
        if self._lingering is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._body_headers():
            # Its body is still to come.
            return
        super().on_message_complete()
        if self._lingering is not None:
            self._lingering.set()

    # --- What requests call

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and not self.pipeline and self.cycle.response_complete:
            self._await_request()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Runs the application. An answer that begins before its request's body has come ends the connection."""
        self._stop_timer()
        # The body of a request that has others behind it has come.
        cycle = self.cycle if self.cycle is not None and self.cycle.scope is scope else None
        closes = False

        async def send_first(message: Any) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                if cycle is not None and cycle.more_body:
                    closes = True
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif closes and cycle is not None and not message.get("more_body", False):
                # The answer is sent before the wait, all but its end.
                await send({**message, "more_body": True})
                await self._linger(cycle)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._application(scope, receive, send_first)

    async def _linger(self, cycle: RequestResponseCycle) -> None:
        """Waits for the end of a body that nobody wants, for a while."""
        if not cycle.more_body or cycle.disconnected:
            return
        self._lingering = asyncio.Event()
        cycle.body.clear()
        self.flow.resume_reading()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._lingering.wait()

    # --- Bounds

    def _parse(self, data: bytes) -> bytes:
        """Parses bytes. Returns those behind the headers of a request that asks for another protocol, as each of Java's
        HttpClient does: it is answered in this one."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # llhttp expects no body then, but the other protocol. A new parser is told what its body looks like.
            if body_headers := self._body_headers():
                self.parser = httptools.HttpRequestParser(self)
                self._is_told = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + body_headers + b"\r\n")
                self._is_told = False
            return data[upgrade.args[0] :]
        return b""

    def _body_headers(self) -> bytes:
        """Returns the headers of the request that say where its body ends; empty if it has none."""
        of_body = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        if all(name == b"content-length" and not value.strip(b" 0") for name, value in of_body):
            return b""
        return b"".join(b"%s: %s\r\n" % header for header in of_body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers with an error, if no answer is under way, and closes. Reads no more: that costs most of a byte's
        time."""
        self._is_over = True
        cycle = self.cycle
        if not self.is_waiting or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.abort()
            return
        if cycle is not None:
            # The application may wait for the body: it answers nobody.
            cycle.disconnected = True
            cycle.message_event.set()
        body = json.dumps({"error": {"message": why, "type": "invalid_request_error", "code": int(status)}}).encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % (status, status.phrase.encode(), len(body))
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.pause_reading()
        # Whatever else may stop the other timer: nothing that the client does shows while nothing is read.
        self.loop.call_later(LINGER_S, self._close)

    # --- The timer

    def _await_request(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEADERS_S, self._close)

    def _await_reader(self) -> None:
        self._stop_timer()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(outbox.UNREAD_S + _LATER_S, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._await_reader()
        else:
            self.transport.abort()

    def _close(self) -> None:
        self._stop_timer()
        if self.transport.get_write_buffer_size():
            self._await_reader()
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
