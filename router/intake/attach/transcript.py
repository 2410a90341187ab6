"""The events that a stream has sent, kept so that a reader whose connection broke can go on where it stopped."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from router.errors import NotKept, Superseded

Item = TypeVar("Item")


class Reader(Generic[Item]):
    """Reads a transcript from a position on, as an outbox is read. The latest reader of a transcript has it."""

    def __init__(self, transcript: "Transcript[Item]", position: int, first: Sequence[Item]) -> None:
        self._transcript = transcript
        # Items before it have been taken.
        self.position = position
        # Comes before the item at `position`.
        self.first = list(first)
        self.changed = asyncio.Event()
        self._is_closed = False
        self._on_close: Callable[[], object] | None = None

    async def take(self) -> list[Item]:
        """Returns what comes next, at least one item; empty at the end.

        Raises the error that ended the stream, and Superseded once another reader has come.
        """
        return await self._transcript.take(self)

    def on_close(self, call: Callable[[], object]) -> None:
        """Calls `call` when no more will come for this reader: the stream has ended, or another reader has it."""
        self._on_close = call
        if self._is_closed:
            call()

    def close(self) -> None:
        self._is_closed = True
        self.changed.set()
        if self._on_close is not None:
            self._on_close()


def _same(item: Any) -> Any:
    return item


class Transcript(Generic[Item]):
    """Takes items from a source when its reader wants them, and keeps the latest ones, packed.

    Nothing is taken while there is no reader: the source keeps what it has, within its own bound.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[list[Item]]],
        size_of: Callable[[Any], int],
        max_bytes: int,
        on_drop: Callable[[Item], None] = lambda item: None,
        *,
        pack: Callable[[Item], Any] = _same,
        unpack: Callable[[Any], Item] = _same,
    ) -> None:
        """take: returns the next items; empty at the end; raises what ended the stream. size_of: of a packed item.
        on_drop: gets items that are not kept any longer, in order."""
        self._take, self._size_of, self._max_bytes, self._on_drop = take, size_of, max_bytes, on_drop
        self._pack, self._unpack = pack, unpack
        self._items: deque[Any] = deque()
        self._num_dropped = 0
        self._num_bytes = 0
        # Items that a reader has taken.
        self._num_read = 0
        self._advancing: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        # True once the end has been taken from the source; the stream itself may have ended before (`note_end`).
        self.is_over = False
        self._has_ended = False
        self.reader: Reader[Item] | None = None

    @property
    def end(self) -> int:
        """The position after the last item."""
        return self._num_dropped + len(self._items)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_read(self) -> bool:
        """True if a reader has taken everything, and there will be no more."""
        return self.is_over and self._num_read == self.end

    def items(self) -> Iterator[Item]:
        """The items that are kept."""
        return map(self._unpack, self._items)

    def check_position(self, position: int, name: str) -> None:
        """name: of the field that says it. Raises NotKept for a position whose next item is not kept any more."""
        if position < self._num_dropped:
            raise NotKept(
                f"{name}={position}: what follows is not kept any more, only what follows {self._num_dropped} is; "
                "raise stream_buffer_bytes, or send the request again"
            )

    def read_from(self, position: int, first: Sequence[Item] = ()) -> Reader[Item]:
        """Returns the reader that has the transcript from now on. position: checked. first: comes before."""
        assert self._num_dropped <= position <= self.end
        self.displace()
        self.reader = Reader(self, position, first)
        if self._has_ended:
            self.reader.close()
        return self.reader

    def displace(self) -> None:
        """Ends the reader that has the transcript, if one does."""
        former, self.reader = self.reader, None
        if former is not None:
            former.close()

    def leave(self, reader: Reader[Item]) -> bool:
        """Notes that a reader has gone. Returns True if it had the transcript."""
        if self.reader is not reader:
            return False
        self.reader = None
        return True

    def note_end(self) -> None:
        """Notes that the stream has ended: its reader has a bounded time to read the rest."""
        self._has_ended = True
        if self.reader is not None:
            self.reader.close()

    async def take(self, reader: Reader[Item]) -> list[Item]:
        """Returns what comes next for a reader (Reader.take)."""
        while True:
            if self.reader is not reader:
                raise Superseded("another reader has attached to this stream")
            if reader.first:
                taken, reader.first = reader.first, []
                return taken
            if reader.position < self.end:
                skipped = reader.position - self._num_dropped
                taken = [self._unpack(self._items[i]) for i in range(skipped, len(self._items))]
                reader.position = self.end
                self._num_read = max(self._num_read, reader.position)
                return taken
            if self.is_over:
                if self._error is not None:
                    raise self._error
                return []
            # A task of its own: what it takes is not lost if this reader leaves meanwhile.
            if self._advancing is None:
                self._advancing = asyncio.create_task(self._advance())
            reader.changed.clear()
            await reader.changed.wait()

    async def close(self) -> None:
        """Drops everything; a reader that is there sees no more than it has."""
        self.displace()
        if self._advancing is not None:
            self._advancing.cancel()
            await asyncio.gather(self._advancing, return_exceptions=True)
        self._items.clear()
        self._num_bytes = 0

    async def _advance(self) -> None:
        try:
            taken = await self._take()
        except Exception as error:  # noqa: BLE001 - the reader raises it
            self._error, self.is_over = error, True
        else:
            self.is_over = not taken
            self._append(taken)
        self._advancing = None
        if self.reader is not None:
            self.reader.changed.set()

    def _append(self, taken: list[Item]) -> None:
        # What was taken just now stays, however large: no reader has it yet.
        for packed in map(self._pack, taken):
            self._items.append(packed)
            self._num_bytes += self._size_of(packed)
        while self._num_bytes > self._max_bytes and len(self._items) > len(taken):
            packed = self._items.popleft()
            self._num_dropped += 1
            self._num_bytes -= self._size_of(packed)
            self._on_drop(self._unpack(packed))
