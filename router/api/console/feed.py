"""Sends each open console, once a second, the state that it may see. While none is open, it does nothing.

One look at the cluster serves all consoles of a tenant, however many are open, and so do the bytes that tell of it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from router.api.console.state import state_json
from router.api.observer import Observer
from router.security.identity import Identity
from router.streams import outbox
from router.telemetry.event_log import RouterEvent
from runtime.telemetry.rates import RateMeter

log = logging.getLogger("octavo.router.gateway")

_EVERY_S = 1.0
# Seconds of messages that may wait for a console that reads slowly; then it loses the oldest.
_MOST_WAITING = 8
# Events sent at once.
_MOST_SENT = 200


class FeedStream(EventSourceResponse):
    """Sends events until the console goes away, or has read nothing for UNREAD_S."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, send_timeout=outbox.UNREAD_S, sep="\n")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            log.info("a console has read nothing for %g s: its events end", outbox.UNREAD_S)
        finally:
            await self._events.aclose()


class _Reader:
    """One open console. last: the number of the last event that it was sent."""

    def __init__(self, identity: Identity, last: int) -> None:
        self.identity = identity
        self.last = last
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue(_MOST_WAITING)

    def put(self, event: bytes) -> None:
        if self.waiting.full():
            self.waiting.get_nowait()
        self.waiting.put_nowait(event)


class Feed:
    def __init__(self, observer: Observer, images: Callable[[], dict[str, Any]]) -> None:
        """images: tells what images a chat may have (router.api.console.images)."""
        self._observer, self._images = observer, images
        self._readers: set[_Reader] = set()
        # By tenant and its right to see all.
        self._meters: dict[tuple[str, bool], RateMeter] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    async def events(self, identity: Identity) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events `state` and `events` until it is closed."""
        # What happened shortly before is told as well: a page that comes back after a restart has missed it.
        reader = _Reader(identity, 0)
        self._readers.add(reader)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while True:
                yield await reader.waiting.get()
        finally:
            self._readers.discard(reader)

    async def _run(self) -> None:
        try:
            while self._readers:
                began = time.monotonic()
                for key, identity in {_key(reader.identity): reader.identity for reader in self._readers}.items():
                    try:
                        await self._tell(key, identity)
                    except Exception:
                        # One odd answer must not end what all consoles read.
                        log.exception("the console's feed failed for a second")
                await asyncio.sleep(max(_EVERY_S - (time.monotonic() - began), 0.05))
        finally:
            self._task = None
            self._meters.clear()

    async def _tell(self, key: tuple[str, bool], identity: Identity) -> None:
        view = await self._observer.observe_as(identity)
        rates = self._meters.setdefault(key, RateMeter()).take(view, time.monotonic())
        state = _event(b"state", state_json(view, rates, self._images(), is_admin=identity.is_admin))
        events = self._observer.events
        # Readers that were told the same so far, all but new ones, are told the same now.
        news: dict[int, bytes] = {}
        for reader in [each for each in self._readers if _key(each.identity) == key]:
            if reader.last not in news:
                new_events = [each for each in events.since(reader.last) if _may_see(identity, each)]
                lines = [_shown(each, identity) for each in new_events[-_MOST_SENT:]]
                news[reader.last] = _event(b"events", msgspec.json.encode(lines)) if lines else b""
            new = news[reader.last]
            reader.last = events.last
            if new:
                reader.put(new)
            reader.put(state)


def _event(name: bytes, json: bytes) -> bytes:
    """Returns a server-sent event. JSON has no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name, json)


def _key(identity: Identity) -> tuple[str, bool]:
    return identity.tenant, identity.is_admin


def _may_see(identity: Identity, event: RouterEvent) -> bool:
    return identity.is_admin or (event.request_id != "" and event.tenant == identity.tenant)


def _shown(event: RouterEvent, identity: Identity) -> dict[str, object]:
    is_own = event.tenant == identity.tenant
    request_id = event.request_id if is_own else f"{event.tenant}/{event.request_id}"
    return {
        "number": event.number,
        "at": event.at,
        "kind": event.kind,
        "text": event.text,
        "replica": event.replica,
        "request_id": request_id,
    }
