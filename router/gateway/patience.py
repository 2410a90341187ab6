"""How long an HTTP client may take to ask: connections that say a byte now and then hold files and memory."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# For the headers of a request, from the connection or the end of the response before.
HEADERS_S = 20.0
# For the body of one.
BODY_S = 60.0


class PatientProtocol(H11Protocol):
    """uvicorn's own, which waits for headers for ever."""

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
        # A response may be under way still, with a request behind it.
        if self.conn.our_state in (h11.IDLE, h11.DONE):
            self.transport.close()
        else:
            self._await_headers()
