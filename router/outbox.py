"""What a stream has for its client and the client has not read yet: bounded, in order, merged if it lags."""

import asyncio

from protos.inference_pb2 import Chunk, GenerateResponse
from router.errors import RequestError

# Chunks of one choice that wait are merged up to this size: a reader that lags gets few messages, and none too large.
_MERGE_BYTES = 4 * 1024


class OutboxFullError(Exception):
    """More waits than the bound allows."""


class Outbox:
    """Filled by the task that reads a replica, emptied by the task that writes to the client; one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._waiting: list[GenerateResponse] = []
        # By choice: the last waiting chunk, if more can be merged into it.
        self._open: dict[int, Chunk] = {}
        self._closed = False
        self._error: RequestError | None = None
        self._wake = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, event: GenerateResponse, *, counted: bool = True) -> None:
        """counted: against the bound, which is for what piles up. Raises OutboxFullError."""
        assert not self._closed
        if counted:
            self._count(event.ByteSize())
        self._waiting.append(event)
        self._wake.set()

    def put_chunk(self, chunk: Chunk, *, counted: bool = True) -> None:
        """As `put`. Raises OutboxFullError."""
        assert not self._closed
        size = chunk.ByteSize()
        if counted:
            self._count(size)
        last = self._open.get(chunk.index)
        if last is not None and last.exact == chunk.exact and last.ByteSize() + size <= _MERGE_BYTES:
            text, first_token = last.text + chunk.text, last.first_token
            last.MergeFrom(chunk)
            last.text, last.first_token = text, first_token
        else:
            event = GenerateResponse(chunk=chunk)
            self._waiting.append(event)
            self._open[chunk.index] = event.chunk
        self._wake.set()

    def close(self, error: RequestError | None = None, *, discard: bool = False) -> None:
        """Nothing more comes. error: raised once all has been read. discard: what waits is dropped.

        Later calls change nothing.
        """
        if self._closed:
            return
        self._closed, self._error = True, error
        if discard:
            self._waiting.clear()
        self._wake.set()

    async def take(self) -> list[GenerateResponse]:
        """All that waits, at least one event; empty at the end. Raises the error that closed it."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._closed:
                return []
            self._wake.clear()
            await self._wake.wait()
        taken, self._waiting = self._waiting, []
        self._open.clear()
        self._num_bytes = 0
        return taken

    def _count(self, size: int) -> None:
        self._num_bytes += size
        # One event is no pile, however large.
        if self._num_bytes > self._max_bytes and self._waiting:
            raise OutboxFullError
