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

# Few enough that a replica's next message is read within a millisecond or two, whoever has something to write.
_WRITERS_PER_TICK = 16


class WriteQueue:
    """Wakes writers in the order in which they asked, a few in each turn of the event loop.

    To write a message costs ten times what it costs to take a token in. Were all streams of a step woken at once, the
    next step would be read when all have written; with more streams than can be written to in the time of a step, steps
    would wait for ever longer, and each token still leave in a message of its own. As it is, steps are always read in
    time, and a stream that waits its turn gathers the tokens of several: messages become as large as the load asks for,
    and no stream waits longer than it takes to write to each of the others once.
    """

    def __init__(self) -> None:
        self._asked: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def ask(self, turn: asyncio.Future[None]) -> None:
        """`turn` is resolved when it has come; one that is cancelled meanwhile costs no turn."""
        self._asked.append(turn)
        if not self._is_due:
            self._is_due = True
            turn.get_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        num_woken = 0
        while self._asked and num_woken < _WRITERS_PER_TICK:
            turn = self._asked.popleft()
            if not turn.done():
                turn.set_result(None)
                num_woken += 1
        self._is_due = bool(self._asked)
        if self._is_due:
            self._asked[0].get_loop().call_soon(self._next_turn)


# Pieces of one choice that wait are joined up to this size: a reader that lags gets few messages, and none too large.
_JOINED_BYTES = 4 * 1024


class OutboxFullError(Exception):
    """More waits than the bound allows."""


class Outbox:
    """Filled by the task that reads a replica, emptied by the task that writes to the client; one event loop."""

    def __init__(self, max_bytes: int, turns: WriteQueue) -> None:
        self._max_bytes = max_bytes
        self._turns = turns
        self._num_bytes = 0
        self._waiting: list[GenerateResponse | Delta] = []
        # By choice: the last waiting piece, if more can be joined to it.
        self._open: dict[int, Delta] = {}
        # Nothing more comes; `close` sets it.
        self.closed = False
        self._error: RequestError | None = None
        self._on_close: Callable[[], object] | None = None
        # Of a reader that waits; it asks for its turn once there is something for it.
        self._turn: asyncio.Future[None] | None = None
        self._has_asked = False

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
        self._ask()

    def put_piece(self, piece: Delta) -> None:
        """The outbox's from now on. Raises OutboxFullError."""
        assert not self.closed
        self._count(piece.size)
        last = self._open.get(piece.index)
        if last is not None and last.exact == piece.exact and last.size + piece.size <= _JOINED_BYTES:
            last.join(piece)
        else:
            self._waiting.append(piece)
            self._open[piece.index] = piece
        self._ask()

    def close(self, error: RequestError | None = None, *, discard: bool = False) -> None:
        """Nothing more comes. error: raised once all has been read. discard: what waits is dropped.

        Later calls change nothing.
        """
        if self.closed:
            return
        self.closed, self._error = True, error
        if discard:
            self._waiting.clear()
        self._ask()
        if self._on_close is not None:
            self._on_close()

    def on_close(self, call: Callable[[], object]) -> None:
        """`call` is called when nothing more comes: at once if that is so."""
        self._on_close = call
        if self.closed:
            call()

    async def take(self) -> list[GenerateResponse]:
        """All that waits, at least one event; empty at the end. Raises the error that closed it."""
        self._turn, self._has_asked = asyncio.get_running_loop().create_future(), False
        if self._waiting or self.closed:
            self._ask()
        try:
            await self._turn
        finally:
            self._turn = None
        if not self._waiting and self._error is not None:
            raise self._error
        taken, self._waiting = self._waiting, []
        self._open.clear()
        self._num_bytes = 0
        return [event.message() if isinstance(event, Delta) else event for event in taken]

    def _ask(self) -> None:
        if self._turn is not None and not self._has_asked:
            self._has_asked = True
            self._turns.ask(self._turn)

    def _count(self, size: int) -> None:
        self._num_bytes += size
        # One event is no pile, however large; nor is the client slow while its writer waits for a turn.
        if self._num_bytes > self._max_bytes and self._waiting and self._turn is None:
            raise OutboxFullError


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
