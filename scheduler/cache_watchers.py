"""Which Sessions follow the prefix cache, and what each of them has to hear of it."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from scheduler.messages import CacheEvent


class WatchedCache(Protocol):
    """What is asked of the core."""

    def watch_cache(self, enabled: bool) -> None:
        """Keeps events from now on, or ceases to."""
        ...

    def take_cache_events(self) -> Iterable[CacheEvent]:
        """Changes since the last call."""
        ...

    def cache_snapshot(self) -> Iterable[CacheEvent]:
        """What can be found now, as events; the first is CacheCleared."""
        ...


class CacheWatchers:
    """Each Session gets what is in the cache when it joins, and from then on every change.

    The core keeps events only while somebody watches.
    """

    def __init__(self) -> None:
        self._joining: list[int] = []
        self._following: set[int] = set()
        self._is_on = False

    def join(self, session: int) -> None:
        self._joining.append(session)

    def leave(self, session: int) -> None:
        """Also of Sessions that never watched."""
        self._following.discard(session)
        if session in self._joining:
            self._joining.remove(session)

    def take(self, cache: WatchedCache) -> Iterator[tuple[int, Iterable[CacheEvent]]]:
        """The news for each Session, since the last call."""
        is_wanted = bool(self._joining or self._following)
        if is_wanted != self._is_on:
            cache.watch_cache(is_wanted)
            self._is_on = is_wanted
        if not is_wanted:
            return
        changes = cache.take_cache_events()
        if changes:
            for session in self._following:
                yield session, changes
        # After the changes: these are in the snapshot.
        if self._joining:
            snapshot = cache.cache_snapshot()
            for session in self._joining:
                yield session, snapshot
            self._following.update(self._joining)
            self._joining.clear()
