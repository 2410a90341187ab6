"""Clients that live and do not read: what has ended waits for them, but not for ever."""

import asyncio
import contextlib
from collections.abc import Iterator

from router.outbox import Outbox

# From a stream's end: so long its last words, and what was in gRPC's buffers before them, may take to get through.
UNREAD_S = 60.0


@contextlib.contextmanager
def bounded_reading(outbox: Outbox) -> Iterator[None]:
    """Inside, this task may go on for UNREAD_S after the outbox is closed, and is cancelled then.

    A write to a client whose flow-control window is full waits for as long as the client answers pings. Nothing else
    ends it: the status of the call would wait behind it.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    timers: list[asyncio.TimerHandle] = []
    outbox.on_close(lambda: timers.append(loop.call_later(UNREAD_S, task.cancel)))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
