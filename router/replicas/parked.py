"""Parks streams that have begun and that no replica can take now: each waits for a replica, its deadline or the end of
the router.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import Gauge

from protos.scheduler_pb2 import CANCEL_REASON_DEADLINE
from router.errors import DeadlineExceeded, RequestError
from router.replicas.placed_stream import PlacedStream
from router.replicas.slices import run_in_slices

log = logging.getLogger("octavo.router.held")

# Streams refused by full queues try again in batches, at intervals: each brings all its tokens with it.
_TRIES, _TRY_AGAIN_S = 32, 0.25
# An outage is logged once, and not again for this long if streams come and go.
_QUIET_S = 10.0


class _Parked(NamedTuple):
    go_on: Callable[[], None]
    # Fires at the deadline, if the stream has one.
    timer: asyncio.TimerHandle | None


class ParkedStreams:
    """Parked streams, in order of arrival. They stay live: they count, and can be cancelled."""

    def __init__(self, gauge: Gauge, describe: Callable[[], str]) -> None:
        """gauge: shows their number. describe: returns the state of the replicas, for the log."""
        self._gauge = gauge
        self._describe = describe
        self._parked: dict[PlacedStream, _Parked] = {}
        self._next_try: asyncio.TimerHandle | None = None
        self._ending: RequestError | None = None
        self._told_at = -_QUIET_S

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, stream: PlacedStream, go_on: Callable[[], None]) -> None:
        """Parks a stream. go_on: submits it, or parks it again."""
        if self._ending is not None:
            stream.fail(self._ending)
            return
        now = time.monotonic()
        if not self._parked and now - self._told_at >= _QUIET_S:
            log.warning("no replica takes streams that have begun: they are held until one does: %s", self._describe())
            self._told_at = now
        deadline = stream.request.deadline
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - now, _expire, stream)
        self._parked[stream] = _Parked(go_on, timer)
        self._changed()

    def forget(self, stream: PlacedStream) -> None:
        """Drops a stream that has ended."""
        if stream in self._parked:
            self._unpark(stream)
            self._changed()

    def release(self) -> None:
        """Submits all streams, or parks them again: a replica can take requests."""
        self._try(len(self._parked))

    def end(self, error: RequestError) -> None:
        """Ends all parked streams, and from now on every stream that would be parked."""
        self._ending = error
        for stream in list(self._parked):
            stream.fail(error)

    def _try(self, count: int) -> None:
        run_in_slices(self._go_on(list(self._parked)[:count]))

    def _go_on(self, streams: Sequence[PlacedStream]) -> Iterator[None]:
        for stream in streams:
            # It may have ended since the last slice.
            if stream in self._parked:
                self._unpark(stream).go_on()
            yield
        self._changed()

    def _try_some(self) -> None:
        self._next_try = None
        self._try(_TRIES)

    def _unpark(self, stream: PlacedStream) -> _Parked:
        parked = self._parked.pop(stream)
        if parked.timer is not None:
            parked.timer.cancel()
        return parked

    def _changed(self) -> None:
        self._gauge.set(len(self._parked))
        if self._parked and self._next_try is None:
            # Spread out, so that routers whose streams were refused together do not come back together.
            delay = _TRY_AGAIN_S * random.uniform(0.5, 1.5)
            self._next_try = asyncio.get_running_loop().call_later(delay, self._try_some)
        elif not self._parked and self._next_try is not None:
            self._next_try.cancel()
            self._next_try = None


def _expire(stream: PlacedStream) -> None:
    stream.fail(DeadlineExceeded("the deadline passed while no replica could continue"), CANCEL_REASON_DEADLINE)
