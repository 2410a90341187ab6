"""Which Sessions follow the prefix cache, and what each of them has to hear of it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from scheduler.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent

# Names of what a cache held before, told between two steps: 7 ms of the step loop, measured, and 150 KB. A million at
# once would be more than may wait for a router.
MAX_UNTOLD_AT_ONCE = 4096


class WatchedCache(Protocol):
    """What is asked of the core."""

    def watch_cache(self, enabled: bool) -> None:
        """Keeps events from now on, or ceases to."""
        ...

    def take_cache_events(self) -> Sequence[CacheEvent]:
        """Changes since the last call."""
        ...

    def cached_names(self) -> Iterable[bytes]:
        """Of the blocks that can be found now."""
        ...


class CacheWatchers:
    """Each Session gets what is in the cache when it joins, and from then on every change.

    The core keeps events only while somebody watches.
    """

    def __init__(self) -> None:
        # By Session: names that were in the cache when it joined and are still to be told; None: it has just joined.
        self._untold: dict[int, dict[bytes, None] | None] = {}
        self._is_on = False

    def join(self, session: int) -> None:
        self._untold[session] = None

    def leave(self, session: int) -> None:
        """Also of Sessions that never watched."""
        self._untold.pop(session, None)

    def take(self, cache: WatchedCache) -> Iterator[tuple[int, Sequence[CacheEvent]]]:
        """The news for each Session, since the last call."""
        is_wanted = bool(self._untold)
        if is_wanted != self._is_on:
            cache.watch_cache(is_wanted)
            self._is_on = is_wanted
        if not is_wanted:
            return
        changes = cache.take_cache_events()
        for session, untold in self._untold.items():
            if untold is None:
                # The changes are in it.
                untold = self._untold[session] = dict.fromkeys(cache.cached_names())
                events: list[CacheEvent] = [CacheCleared()]
            else:
                _forget(untold, changes)
                events = list(changes)
            events += [BlockStored(untold.popitem()[0]) for _ in range(min(len(untold), MAX_UNTOLD_AT_ONCE))]
            if events:
                yield session, events


def _forget(names: dict[bytes, None], changes: Iterable[CacheEvent]) -> None:
    """What is gone is not told any more."""
    for event in changes:
        if isinstance(event, BlockRemoved):
            names.pop(event.name, None)
        elif isinstance(event, CacheCleared):
            names.clear()
