"""The events that a client has not read yet: bounded, in order, merged if the client lags, and written in fair
turns.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from protos.inference_pb2 import GenerateResponse
from router.errors import RequestError
from router.streams.choices import Delta

# Few enough that a replica's next message is read within a millisecond or two, however many have something to write.
_WRITERS_PER_TICK = 16


class WriteQueue:
    """Wakes writers in the order in which they queued, a few in each turn of the event loop.

    To write a message costs ten times what it costs to take a token in. Were all streams of a step woken at once, the
    next step would be read when all have written; with more streams than can be written to in the time of a step, steps
    would wait for ever longer, and each token still leave in a message of its own. As it is, steps are always read in
    time, and a stream that waits its turn gathers the tokens of several: messages become as large as the load asks for,
    and no stream waits longer than it takes to write to each of the others once.
    """

    def __init__(self) -> None:
        self._queued: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def enqueue(self, wakeup: asyncio.Future[None]) -> None:
        """Resolves `wakeup` when its turn has come; one that is cancelled meanwhile costs no turn."""
        self._queued.append(wakeup)
        if not self._is_due:
            self._is_due = True
            wakeup.get_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        num_woken = 0
        while self._queued and num_woken < _WRITERS_PER_TICK:
            wakeup = self._queued.popleft()
            if not wakeup.done():
                wakeup.set_result(None)
                num_woken += 1
        self._is_due = bool(self._queued)
        if self._is_due:
            self._queued[0].get_loop().call_soon(self._wake_some)


# Deltas of one choice that wait are joined up to this size: a reader that lags gets few messages, and none too large.
_JOINED_BYTES = 4 * 1024


class OutboxFullError(Exception):
    """More waits than the bound allows."""


class Outbox:
    """Filled by the task that reads a replica, emptied by the task that writes to the client; one event loop."""

    def __init__(self, max_bytes: int, write_queue: WriteQueue) -> None:
        self._max_bytes = max_bytes
        self._write_queue = write_queue
        self._num_bytes = 0
        self._waiting: list[GenerateResponse | Delta] = []
        # By choice: the last waiting delta, if more can be joined to it.
        self._open: dict[int, Delta] = {}
        # Nothing more comes; `close` sets it.
        self.closed = False
        self._error: RequestError | None = None
        self._on_close: Callable[[], object] | None = None
        # Of a writer that waits; it queues once there is something for it.
        self._wakeup: asyncio.Future[None] | None = None
        self._is_queued = False

    @property
    def is_delivered(self) -> bool:
        """It was closed without an error, and all of it has been taken."""
        return self.closed and self._error is None and not self._waiting

    def put(self, event: GenerateResponse, *, counted: bool = True) -> None:
        """counted: against the bound, which is for what piles up. Raises OutboxFullError."""
        assert not self.closed
        if counted:
            self._count(event.ByteSize())
        self._waiting.append(event)
        self._open.clear()
        self._wake_writer()

    def put_delta(self, delta: Delta) -> None:
        """Takes the delta over. Raises OutboxFullError."""
        assert not self.closed
        self._count(delta.size)
        last = self._open.get(delta.index)
        if last is not None and last.exact == delta.exact and last.size + delta.size <= _JOINED_BYTES:
            last.join(delta)
        else:
            self._waiting.append(delta)
            self._open[delta.index] = delta
        self._wake_writer()

    def close(self, error: RequestError | None = None, *, discard: bool = False) -> None:
        """Nothing more comes. error: raised once all has been read. discard: what waits is dropped.

        Later calls change nothing.
        """
        if self.closed:
            return
        self.closed, self._error = True, error
        if discard:
            self._waiting.clear()
        self._wake_writer()
        if self._on_close is not None:
            self._on_close()

    def on_close(self, call: Callable[[], object]) -> None:
        """`call` is called when nothing more comes: at once if that is so."""
        self._on_close = call
        if self.closed:
            call()

    async def take(self) -> list[GenerateResponse]:
        """All that waits, at least one event; empty at the end. Raises the error that closed it."""
        self._wakeup, self._is_queued = asyncio.get_running_loop().create_future(), False
        if self._waiting or self.closed:
            self._wake_writer()
        try:
            await self._wakeup
        finally:
            self._wakeup = None
        if not self._waiting and self._error is not None:
            raise self._error
        taken, self._waiting = self._waiting, []
        self._open.clear()
        self._num_bytes = 0
        return [event.message() if isinstance(event, Delta) else event for event in taken]

    def _wake_writer(self) -> None:
        if self._wakeup is not None and not self._is_queued:
            self._is_queued = True
            self._write_queue.enqueue(self._wakeup)

    def _count(self, size: int) -> None:
        self._num_bytes += size
        # One event is no pile, however large; nor is the client slow while its writer waits for a turn.
        if self._num_bytes > self._max_bytes and self._waiting and self._wakeup is None:
            raise OutboxFullError


# From a stream's end: how long its last words, and what was in gRPC's buffers before them, may take to get through.
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
