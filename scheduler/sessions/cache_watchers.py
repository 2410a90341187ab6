"""Sends routers that watch the prefix cache its content and its changes."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from scheduler.core.core import Core
from scheduler.core.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent

# At most this many hashes of older cache content go to a new watcher between two steps: 7 ms of the step loop,
# measured, and 150 KB. A million at once would overfill the router's buffer.
MAX_UNTOLD_AT_ONCE = 4096


class CacheWatchers:
    """Sends each watching Session the content of the cache when it joins, and every change after that.

    The core keeps events only while a Session watches, or for `publish`.
    """

    def __init__(self, publish: Callable[[Sequence[CacheEvent]], None] | None = None) -> None:
        """publish: called with all changes, of all Sessions or none; None: nobody but Sessions watches."""
        self._publish = publish
        # By Session: hashes that were in the cache when it joined and are still to be sent; None: it has just joined.
        self._untold: dict[int, dict[bytes, None] | None] = {}
        self._is_on = False

    def join(self, session: int) -> None:
        self._untold[session] = None

    def leave(self, session: int) -> None:
        """Removes a Session, even one that never watched."""
        self._untold.pop(session, None)

    def take(self, core: Core) -> Iterator[tuple[int, Sequence[CacheEvent]]]:
        """Yields the events for each Session since the last call."""
        is_wanted = bool(self._untold) or self._publish is not None
        if is_wanted != self._is_on:
            core.watch_cache(is_wanted, contents=self._publish is not None)
            self._is_on = is_wanted
        if not is_wanted:
            return
        changes = core.take_cache_events()
        if changes and self._publish is not None:
            self._publish(changes)
        for session, untold in self._untold.items():
            if untold is None:
                # The hashes include the changes already.
                untold = self._untold[session] = dict.fromkeys(core.cached_hashes())
                events: list[CacheEvent] = [CacheCleared()]
            else:
                _forget(untold, changes)
                events = list(changes)
            events += [BlockStored(untold.popitem()[0]) for _ in range(min(len(untold), MAX_UNTOLD_AT_ONCE))]
            if events:
                yield session, events


def _forget(untold: dict[bytes, None], changes: Iterable[CacheEvent]) -> None:
    """Drops hashes that are no longer in the cache."""
    for event in changes:
        if isinstance(event, BlockRemoved):
            untold.pop(event.block_hash, None)
        elif isinstance(event, CacheCleared):
            untold.clear()
