"""The events that a client has not read yet: bounded, in order, merged if the client lags, and written in fair
turns.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from protos.inference_pb2 import GenerateResponse
from router.errors import RequestError
from router.streams.choices import Delta

# Few enough that a replica's next message is read within a millisecond or two, however many streams wait to write.
_WRITERS_PER_TICK = 16


class WriteQueue:
    """Wakes writers in the order in which they queued, a few in each turn of the event loop.

    Writing a message costs ten times as much as taking in a token. If all streams of a step woke at once, the next step
    would be read only after all have written; with more streams than can be written to during a step, steps would wait
    longer and longer, and each token would still leave in a message of its own. With turns, steps are read in time, and
    a waiting stream gathers the tokens of several steps: messages grow with the load, and no stream waits longer than
    it takes to write to each of the others once.
    """

    def __init__(self) -> None:
        self._queued: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def enqueue(self, wakeup: asyncio.Future[None]) -> None:
        """Resolves `wakeup` when its turn has come; a cancelled one costs no turn."""
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


# Waiting deltas of one choice are joined up to this size: a reader that lags gets few messages, and none too large.
_JOINED_BYTES = 4 * 1024
# What a reader takes at once, or one event more: 3,000 logprobs, which take 2 ms to become messages and 5 to be JSON.
TAKEN_BYTES = 64 * 1024


class OutboxFullError(Exception):
    """More bytes wait than the bound allows."""


class _Counted:
    """A message that counts towards the bound, as a delta does."""

    __slots__ = ("_event", "size")

    def __init__(self, event: GenerateResponse) -> None:
        self._event, self.size = event, event.ByteSize()

    def message(self) -> GenerateResponse:
        return self._event


class Outbox:
    """Filled by the task that reads a replica, emptied by the task that writes to the client; one event loop."""

    def __init__(self, max_bytes: int, write_queue: WriteQueue) -> None:
        self._max_bytes = max_bytes
        self._write_queue = write_queue
        self._num_bytes = 0
        self._waiting: list[GenerateResponse | Delta | _Counted] = []
        # By choice: the last waiting delta, if more can be joined to it.
        self._open: dict[int, Delta] = {}
        # True once nothing more comes; `close` sets it.
        self.closed = False
        self._error: RequestError | None = None
        self._on_close: Callable[[], object] | None = None
        # The future of a waiting writer, which queues once there is something to write.
        self._wakeup: asyncio.Future[None] | None = None
        self._is_queued = False
        # Set by `keep` and `collect`.
        self._is_kept = self._is_collected = False

    @property
    def is_delivered(self) -> bool:
        """True if it was closed without an error, and all of it has been taken or is kept for a reader to come."""
        return self.closed and self._error is None and (self._is_kept or not self._waiting)

    def keep(self) -> None:
        """Notes that what waits may be read after the stream has ended. Half of the bound is left, for as much is kept
        of what has been read (router.intake.attach)."""
        self._is_kept = True
        self._max_bytes //= 2

    def collect(self) -> None:
        """Notes that this process reads it, for an answer that comes whole: what waits is no sign of a slow client."""
        self._is_collected = True

    def raise_error(self) -> None:
        """Raises the error that closed it, if one did."""
        if self._error is not None:
            raise self._error

    def put(self, event: GenerateResponse, *, counted: bool = True) -> None:
        """Adds an event. counted: it counts towards the bound, which is for what piles up. Raises OutboxFullError."""
        assert not self.closed
        if counted:
            item = _Counted(event)
            self._count(item.size)
            self._waiting.append(item)
        else:
            self._waiting.append(event)
        self._open.clear()
        self._wake_writer()

    def put_delta(self, delta: Delta) -> None:
        """Adds a delta, and takes it over. Raises OutboxFullError."""
        assert not self.closed
        self._count(delta.size)
        if self._is_kept:
            delta.pack()
        last = self._open.get(delta.index)
        if last is not None and last.exact == delta.exact and last.size + delta.size <= _JOINED_BYTES:
            last.join(delta)
        else:
            self._waiting.append(delta)
            self._open[delta.index] = delta
        self._wake_writer()

    def close(self, error: RequestError | None = None, *, discard: bool = False) -> None:
        """Marks the end. error: raised once all has been read. discard: drops what waits.

        Later calls change nothing.
        """
        if self.closed:
            return
        self.closed, self._error = True, error
        if discard:
            self.discard()
        self._wake_writer()
        if self._on_close is not None:
            self._on_close()

    def discard(self) -> None:
        """Drops what waits: it will not be read."""
        self._waiting.clear()
        self._open.clear()
        self._num_bytes = 0

    def on_close(self, call: Callable[[], object]) -> None:
        """Calls `call` when the outbox is closed; at once if it is already."""
        self._on_close = call
        if self.closed:
            call()

    async def take(self) -> list[GenerateResponse]:
        """Returns what waits, at least one event and little more than TAKEN_BYTES; empty at the end. Raises the error
        that closed it."""
        self._wakeup, self._is_queued = asyncio.get_running_loop().create_future(), False
        if self._waiting or self.closed:
            self._wake_writer()
        try:
            await self._wakeup
        finally:
            self._wakeup = None
        if not self._waiting and self._error is not None:
            raise self._error
        return [event if isinstance(event, GenerateResponse) else event.message() for event in self._take_first()]

    def _take_first(self) -> list[GenerateResponse | Delta | _Counted]:
        taken, size = self._waiting, 0
        if self._num_bytes > TAKEN_BYTES:
            for count, event in enumerate(taken, 1):
                size += 0 if isinstance(event, GenerateResponse) else event.size
                if size >= TAKEN_BYTES and count < len(taken):
                    self._waiting = taken[count:]
                    self._num_bytes -= size
                    # What is left may still grow at its end.
                    left = set(map(id, self._waiting))
                    self._open = {index: delta for index, delta in self._open.items() if id(delta) in left}
                    return taken[:count]
        self._waiting = []
        self._open.clear()
        self._num_bytes = 0
        return taken

    def _wake_writer(self) -> None:
        if self._wakeup is not None and not self._is_queued:
            self._is_queued = True
            self._write_queue.enqueue(self._wakeup)

    def _count(self, size: int) -> None:
        self._num_bytes += size
        # A single event is allowed, however large; and a client whose writer waits for a turn is not slow.
        if self._num_bytes > self._max_bytes and self._waiting and self._wakeup is None and not self._is_collected:
            raise OutboxFullError


# Time after a stream's end for its last messages, and for what is in gRPC's buffers before them, to get through.
UNREAD_S = 60.0


class Closing(Protocol):
    """An outbox, or what reads one for a client."""

    def on_close(self, call: Callable[[], object]) -> None:
        """Calls `call` when no more will come; at once if that is so already."""
        ...


@contextlib.contextmanager
def bounded_reading(outbox: Closing) -> Iterator[None]:
    """Cancels this task if it is still inside UNREAD_S after the outbox is closed.

    A write to a client whose flow-control window is full waits for as long as the client answers pings. Nothing else
    ends it, and the status of the call would wait behind it.
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


@contextlib.contextmanager
def bounded_write() -> Iterator[None]:
    """Cancels this task if it is still inside after UNREAD_S: its write is to a client that reads nothing."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(UNREAD_S, task.cancel)
    try:
        yield
    finally:
        timer.cancel()
