"""Messages on their way to a router, from the step loop to the call that writes them: those that wait are joined.

A router that lags reads a message now and then. It gets all steps that wait by then in one message, as many as fit into
1 MiB: taking in a sequence's tokens of several steps at once costs it half as much as step by step.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from runtime.wire import SESSION_MESSAGE_BYTES

# Routers always read their Session. A router that lets this much pile up is cut off.
SESSION_BUFFER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A SchedulerMessage, serialized in two parts.

    body: all but the load. load: a message of the load alone; empty if there is none. has_welcome: the body has a
    Welcome, and no earlier parcel is joined in front of it.
    """

    body: bytes
    load: bytes = b""
    has_welcome: bool = False

    def __len__(self) -> int:
        return len(self.body) + len(self.load)

    @property
    def message(self) -> bytes:
        """The whole message."""
        return self.body + self.load


class Outgoing:
    """Parcels that wait for one router's call to send them. For the event loop's thread."""

    def __init__(self, bound: int) -> None:
        """bound: bytes; more than this may not wait."""
        self._waiting: deque[Parcel] = deque()
        self._size, self._bound = 0, bound
        self._changed = asyncio.Event()
        self.is_overfull = False
        self.is_closed = False

    def put(self, parcels: list[Parcel]) -> None:
        if self.is_overfull:
            return
        self._waiting += parcels
        self._size += sum(map(len, parcels))
        if self._size > self._bound:
            self.is_overfull = True
            self._waiting.clear()
        self._changed.set()

    def close(self) -> None:
        """Takes no more parcels; those that wait still go out."""
        self.is_closed = True
        self._changed.set()

    async def get(self) -> bytes | None:
        """Returns the next message, made of all parcels that fit into one; None at the end."""
        while not self._waiting:
            if self.is_closed or self.is_overfull:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    def _take(self) -> bytes:
        """Joins parcels. Messages of protobuf are merged by putting their bytes together: repeated fields grow. A load
        would be merged field by field, and so only the last one is sent."""
        first = self._waiting.popleft()
        self._size -= len(first)
        bodies, size, load = [first.body], len(first.body), first.load
        while self._waiting:
            following = self._waiting[0]
            size += len(following.body)
            if following.has_welcome or size + max(len(load), len(following.load)) > SESSION_MESSAGE_BYTES:
                break
            self._waiting.popleft()
            self._size -= len(following)
            bodies.append(following.body)
            load = following.load or load
        return b"".join((*bodies, load))
