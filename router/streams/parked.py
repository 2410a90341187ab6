"""Parks streams that have begun and that no replica can take now: each waits for one, its deadline or the router's
end.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from prometheus_client import Gauge

from protos.scheduler_pb2 import CANCEL_REASON_DEADLINE
from router.errors import DeadlineExceeded, RequestError
from router.streams.stream import Stream

log = logging.getLogger("octavo.router.held")

# Those that every queue was too full for try again: so many at once, so often. They bring all their tokens with them.
_TRIES, _TRY_AGAIN_S = 32, 0.25
# An outage is told once, and not again for so long if streams come and go.
_QUIET_S = 10.0


class ParkedStreams:
    """In the order in which they came. They stay live meanwhile: they count, and can be cancelled."""

    def __init__(self, gauge: Gauge, go_on: Callable[[Stream], None], describe: Callable[[], str]) -> None:
        """go_on: submits a stream or holds it again. describe: of the replicas, for the log."""
        self._gauge = gauge
        self._go_on = go_on
        self._describe = describe
        # With the timers of their deadlines.
        self._held: dict[Stream, asyncio.TimerHandle | None] = {}
        self._next_try: asyncio.TimerHandle | None = None
        self._ending: RequestError | None = None
        self._told_at = -_QUIET_S

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, stream: Stream) -> None:
        if self._ending is not None:
            stream.fail(self._ending)
            return
        now = time.monotonic()
        if not self._held and now - self._told_at >= _QUIET_S:
            log.warning("no replica takes streams that have begun: they are held until one does: %s", self._describe())
            self._told_at = now
        deadline = stream.request.deadline
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - now, self._expire, stream)
        self._held[stream] = timer
        self._changed()

    def forget(self, stream: Stream) -> None:
        """It has ended, however it did."""
        if stream in self._held:
            self._take(stream)
            self._changed()

    def release(self) -> None:
        """A replica can take requests: all go on."""
        self._try(len(self._held))

    def end(self, error: RequestError) -> None:
        """Ends all, and from now on each one that would be held."""
        self._ending = error
        for stream in list(self._held):
            stream.fail(error)

    def _try(self, count: int) -> None:
        for stream in list(self._held)[:count]:
            self._take(stream)
            self._go_on(stream)
        self._changed()

    def _try_some(self) -> None:
        self._next_try = None
        self._try(_TRIES)

    def _take(self, stream: Stream) -> None:
        timer = self._held.pop(stream)
        if timer is not None:
            timer.cancel()

    def _expire(self, stream: Stream) -> None:
        stream.fail(DeadlineExceeded("the deadline passed while no replica could go on"), CANCEL_REASON_DEADLINE)

    def _changed(self) -> None:
        self._gauge.set(len(self._held))
        if self._held and self._next_try is None:
            # Several routers whose streams were refused together do not all come back together.
            delay = _TRY_AGAIN_S * random.uniform(0.5, 1.5)
            self._next_try = asyncio.get_running_loop().call_later(delay, self._try_some)
        elif not self._held and self._next_try is not None:
            self._next_try.cancel()
            self._next_try = None
