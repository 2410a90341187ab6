"""The registry of this router's live streams, by request id and tenant (Request.scoped_id)."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

from protos.inference_pb2 import CancelResponse
from router.accepted import Request
from router.errors import Cancelled, DuplicateRequest, RequestError, Superseded
from router.replicas.broadcast import newest
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics


class _Preparing:
    """A request that has no stream yet, and the task that prepares it."""

    def __init__(self, attempt: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.attempt, self.is_cancelled = attempt, False
        self._task, self._num_cancels = task, task.cancelling()

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()

    def take_cancel(self) -> bool:
        """Called as the task's cancel comes through. Returns True if it was ours alone, and undoes it."""
        return self.is_cancelled and self._task.uncancel() <= self._num_cancels


class StreamRegistry:
    """Keeps ids unique and attempts in order. A stream is live until its client's call has ended."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._streams: dict[str, Stream] = {}
        # Includes streams that another attempt has displaced and whose calls have not ended yet.
        self._open: set[Stream] = set()
        self._preparing: defaultdict[str, set[_Preparing]] = defaultdict(set)
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

    @contextlib.contextmanager
    def preparing(self, scoped_id: str, attempt: int) -> Iterator[None]:
        """Lets `cancel` find a request that this task prepares, until its stream is there. Raises Cancelled."""
        entry = _Preparing(attempt)
        self._preparing[scoped_id].add(entry)
        try:
            yield
            if entry.take_cancel():
                # Something on the way has swallowed it.
                raise _cancelled()
        except asyncio.CancelledError:
            if entry.take_cancel():
                raise _cancelled() from None
            raise
        finally:
            entries = self._preparing[scoped_id]
            entries.discard(entry)
            if not entries:
                del self._preparing[scoped_id]

    def cancel(self, scoped_id: str) -> CancelResponse:
        """Ends all attempts of a request that are here. Returns the newest of them, which may have been complete."""
        found = [CancelResponse()]
        for entry in self._preparing.get(scoped_id, ()):
            entry.cancel()
            found.append(CancelResponse(cancelled=True, attempt=entry.attempt))
        stream = self._streams.get(scoped_id)
        if stream is not None and not stream.done:
            stream.fail(_cancelled())
            found.append(CancelResponse(cancelled=True, attempt=stream.request.attempt))
        elif stream is not None and stream.complete:
            # Its client has not got all of it yet.
            found.append(CancelResponse(attempt=stream.request.attempt))
        return newest(found)

    def fail_all(self, error: RequestError) -> None:
        for stream in list(self._open):
            stream.fail(error)

    async def wait_empty(self) -> None:
        await self._empty.wait()


def _cancelled() -> Cancelled:
    return Cancelled("Cancel was called for this request")
