"""The registry of this router's live streams, by request id and tenant (Request.scoped_id)."""

import asyncio
from collections.abc import Iterator

from router.errors import Cancelled, DuplicateRequest, RequestError, Superseded
from router.request import Request
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics


class StreamRegistry:
    """Keeps ids unique and attempts in order. A stream is live until its client's call has ended."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._streams: dict[str, Stream] = {}
        # Includes streams that another attempt has displaced and whose calls have not ended yet.
        self._open: set[Stream] = set()
        self._metrics = metrics
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._open))

    def find(self, scoped_id: str) -> Stream | None:
        stream = self._streams.get(scoped_id)
        return None if stream is None or stream.done else stream

    def admit(self, request: Request) -> None:
        """Makes way for a request, ending a lower attempt. Raises DuplicateRequest or Superseded."""
        live = self._streams.get(request.scoped_id)
        if live is None or live.done:
            return
        attempt, shown = live.request.attempt, f"request_id={request.request_id!r}"
        if request.attempt == attempt or request.resume is None:
            raise DuplicateRequest(
                f"{shown} is live (attempt {attempt}): choose another id, or resume it with a higher attempt"
            )
        if request.attempt < attempt:
            raise Superseded(f"{shown}: attempt {request.attempt} is below the live one, {attempt}")
        live.fail(Superseded(f"{shown}: attempt {request.attempt} has taken over from {attempt}"))

    def add(self, stream: Stream) -> None:
        self._streams[stream.request.scoped_id] = stream
        self._open.add(stream)
        self._empty.clear()
        self._metrics.streams.set(len(self._open))

    def remove(self, stream: Stream) -> None:
        self._open.discard(stream)
        if self._streams.get(stream.request.scoped_id) is stream:
            del self._streams[stream.request.scoped_id]
        if not self._open:
            self._empty.set()
        self._metrics.streams.set(len(self._open))

    def cancel(self, scoped_id: str) -> bool:
        """Cancels a live request; False if none has this id."""
        stream = self.find(scoped_id)
        if stream is None:
            return False
        stream.fail(Cancelled("Cancel was called for this request"))
        return True

    def fail_all(self, error: RequestError) -> None:
        for stream in list(self._open):
            stream.fail(error)

    async def wait_empty(self) -> None:
        await self._empty.wait()
