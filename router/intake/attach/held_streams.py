"""The streams of this router that can outlive their reader's connection, by id; bounded in number and time."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal

from prometheus_client import Gauge

from router.errors import DuplicateRequest, Internal, UnknownRequest
from router.intake.attach.transcript import Reader, Transcript
from router.streams.states import Lifecycle, StreamState
from router.telemetry.call_context import log_fields

log = logging.getLogger("octavo.router.intake.attach")

# How a stream was begun. It is read in the same way.
Protocol = Literal["grpc", "http"]


class HeldStream(Lifecycle):
    """A stream that may lose its reader."""

    def __init__(
        self,
        held: "HeldStreams",
        *,
        scoped_id: str,
        tenant: str,
        timeout: float,
        protocol: Protocol,
        transcript: Transcript[Any],
        end: Callable[[], Awaitable[object]],
        kept: Any = None,
        is_single: bool = True,
    ) -> None:
        """held: where it is added. timeout: seconds for which it goes on without a reader. end: ends it, if it has not
        ended. kept: for code that knows the protocol. is_single: it is one request, of this id, and not several
        together."""
        super().__init__(StreamState.ATTACHED)
        self._all = held
        self.scoped_id, self.tenant, self.timeout = scoped_id, tenant, timeout
        self.protocol: Protocol = protocol
        self.transcript = transcript
        self.end = end
        self.kept = kept
        self.is_single = is_single
        # Ends it when its time without a reader is over.
        self.timer: asyncio.TimerHandle | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        return log_fields(self.scoped_id)

    def end_by(self, error: Internal) -> None:
        self._all.forget(self)


class HeldStreams:
    def __init__(self, max_detached: int, gauge: Gauge) -> None:
        """max_detached: option max_detached_streams. gauge: shows how many have no reader."""
        self.max_detached = max_detached
        self._gauge = gauge
        self._streams: dict[str, HeldStream] = {}
        # Those without a reader, by tenant; the one that has had none for longest comes first.
        self._detached: defaultdict[str, dict[str, HeldStream]] = defaultdict(dict)
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, scoped_id: str) -> HeldStream | None:
        return self._streams.get(scoped_id)

    def add(self, held: HeldStream) -> None:
        """Adds a stream, whose reader comes at once. One of the same id that has ended makes way.

        Raises DuplicateRequest: then the stream is not added.
        """
        former = self._streams.get(held.scoped_id)
        if former is not None:
            # The registry of streams lets a single request in only if no other of its id is live, or if it has just
            # superseded that.
            if not (former.is_single and held.is_single) and not former.transcript.is_over:
                request_id = held.scoped_id.rpartition("/")[2]
                raise DuplicateRequest(f"request_id={request_id!r} is live: choose another id")
            self.forget(former)
        self._streams[held.scoped_id] = held

    @contextlib.asynccontextmanager
    async def reading(self, held: HeldStream, position: int, first: Sequence[Any] = ()) -> AsyncIterator[Reader[Any]]:
        """A reader that has the stream until another one comes, or this context ends."""
        reader = self.begin_reading(held, position, first)
        try:
            yield reader
        finally:
            self.end_reading(held, reader)

    def begin_reading(self, held: HeldStream, position: int, first: Sequence[Any] = ()) -> Reader[Any]:
        """position, first: as in Transcript.read_from. Raises UnknownRequest if the stream is forgotten."""
        self._leave_detached(held)
        if not held.become(StreamState.ATTACHED):
            raise UnknownRequest(f"request_id={held.scoped_id.rpartition('/')[2]!r}: its stream is not held any more")
        return held.transcript.read_from(position, first)

    def end_reading(self, held: HeldStream, reader: Reader[Any]) -> None:
        """Notes that a reader has gone. Its stream goes on for `timeout`, unless the tenant has too many already."""
        if not held.transcript.leave(reader) or self._streams.get(held.scoped_id) is not held:
            return
        if not self._makes_room(held):
            log.info(
                "max_detached_streams=%d is reached: a stream ends, because its reader has gone", self.max_detached
            )
            self.forget(held)
            return
        if not held.become(StreamState.DETACHED):
            return
        self._detached[held.tenant][held.scoped_id] = held
        self._gauge.inc()
        held.timer = asyncio.get_running_loop().call_later(held.timeout, self.forget, held)

    def drop(self, scoped_id: str) -> bool:
        """Ends a stream, and forgets it. False if it is not here."""
        held = self._streams.get(scoped_id)
        if held is not None:
            self.forget(held)
        return held is not None

    async def stop(self) -> None:
        """Ends and forgets all."""
        for held in list(self._streams.values()):
            self.forget(held)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _makes_room(self, held: HeldStream) -> bool:
        """Returns True if the tenant may have one more without a reader. One that has been read to its end makes
        way."""
        detached = self._detached[held.tenant]
        if len(detached) < self.max_detached:
            return True
        for each in detached.values():
            if each.transcript.is_read:
                self.forget(each)
                return True
        return False

    def forget(self, held: HeldStream) -> None:
        """Ends a stream, and drops what it has sent. Later calls change nothing."""
        if held.state is StreamState.FORGOTTEN:
            return
        self._leave_detached(held)
        held.become(StreamState.FORGOTTEN)
        if self._streams.get(held.scoped_id) is held:
            del self._streams[held.scoped_id]
        task = asyncio.get_running_loop().create_task(_close(held))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _leave_detached(self, held: HeldStream) -> None:
        """Takes a stream off those without a reader, if it is one of them."""
        if held.state is not StreamState.DETACHED:
            return
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        detached = self._detached[held.tenant]
        del detached[held.scoped_id]
        if not detached:
            del self._detached[held.tenant]
        self._gauge.dec()


async def _close(held: HeldStream) -> None:
    await held.transcript.close()
    await held.end()
