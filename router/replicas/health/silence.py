"""Ends the wait for a peer's messages when it has been silent for too long, as far as this event loop was awake."""

import asyncio
import math
from types import TracebackType

from runtime.awake_time import AwakeTime

_LONGEST_TICK_S = 1.0


class Silence:
    """A time limit between two messages of a peer, used by the task that reads them:

        async with Silence(10.0) as silence:  # raises TimeoutError
            while True:
                message = await call.read()
                silence.suspend()
                await take_in(message)
                silence.begin()

    After a stall of the event loop, timers run before the messages that have arrived meanwhile are read. So a stall
    counts as one tick at most: the messages are read long before the limit.
    """

    def __init__(self, limit: float) -> None:
        """limit: seconds without a message."""
        self._limit = limit
        self._tick_s = min(_LONGEST_TICK_S, limit / 4)
        self._awake = AwakeTime(self._tick_s)
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0

    @property
    def awake_now(self) -> float:
        """A clock that stands still while the event loop does (seconds)."""
        now = asyncio.get_running_loop().time()
        self._awake.wake(now)
        return now - self._awake.stalled_s

    def suspend(self) -> None:
        """Notes a message: the silence before it has ended, and none is counted until `begin`. While a message is taken
        in, the next one may wait to be read."""
        self._began = math.inf
        if self._timeout.when() is not None:
            self._timeout.reschedule(None)

    def begin(self) -> float:
        """Counts silence from now on. Returns `awake_now`."""
        self._began = self.awake_now
        return self._began

    async def __aenter__(self) -> "Silence":
        await self._timeout.__aenter__()
        self._began = self.awake_now
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if self.awake_now - self._began >= self._limit:
            self._timeout.reschedule(loop.time())
        else:
            self._timer = loop.call_later(self._tick_s, self._tick)
