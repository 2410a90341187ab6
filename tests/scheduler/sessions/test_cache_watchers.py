"""A watcher of a prefix cache knows what is in it, whenever it joined; without watchers no events are kept."""

from collections.abc import Callable

import pytest

from protos import scheduler_pb2
from runtime.wire import SESSION_MESSAGE_BYTES
from scheduler.core.core import Core
from scheduler.core.messages import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from scheduler.core.state.blocks import BlockPool
from scheduler.sessions.cache_watchers import MAX_UNTOLD_AT_ONCE, CacheWatchers
from scheduler.sessions.sessions import Outbox
from tests.support.scheduler.cache_view import CacheView


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Cache(Core):
    """The core's part in watching, around a real BlockPool."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.is_watched = False

    def store(self, number: int) -> None:
        """Publishes a block and releases it at once; it is evicted when others need it."""
        blocks = self.pool.take(1)
        self.pool.publish(blocks[0], name(number))
        self.pool.release(blocks)

    def watch_cache(self, enabled: bool, *, contents: bool = False) -> None:
        self.is_watched = enabled
        self.pool.watch(enabled, contents=contents)

    def take_cache_events(self) -> list[CacheEvent]:
        return self.pool.take_events()

    def cached_hashes(self) -> list[bytes]:
        return self.pool.hashes


def messages_of(events: list[CacheEvent]) -> list[scheduler_pb2.SchedulerMessage]:
    outbox = Outbox()
    outbox.add_cache_events(events)
    return [scheduler_pb2.SchedulerMessage.FromString(each.message) for each in outbox.take()]


class Watching:
    """Sessions that watch a cache, and each one's view of it."""

    def __init__(self, num_blocks: int = 4) -> None:
        self.num_blocks = num_blocks
        self.cache, self.watchers = Cache(num_blocks), CacheWatchers()
        self.views: dict[int, CacheView] = {}
        self.heard: dict[int, list[CacheEvent]] = {}

    def join(self, session: int) -> None:
        self.watchers.join(session)
        self.views[session] = CacheView(block_size=1, max_blocks=self.num_blocks)

    def take(self) -> None:
        self.heard = {session: list(events) for session, events in self.watchers.take(self.cache)}
        for session, events in self.heard.items():
            for message in messages_of(events):
                self.views[session].apply(message.cache_events)

    def knows(self, session: int, *numbers: int) -> bool:
        view = self.views[session]
        return len(view) == len(numbers) and all(view.num_cached_tokens([name(number)]) for number in numbers)


def test_each_session_knows_what_the_cache_holds_whenever_it_joined():
    watching = Watching()
    watching.cache.store(1)
    watching.take()
    assert not watching.cache.is_watched
    watching.join(10)
    watching.take()
    assert watching.knows(10, 1)
    watching.cache.store(2)
    watching.join(20)
    watching.take()
    assert watching.heard[10] == [BlockStored(name(2))]
    assert watching.heard[20][0] == CacheCleared()
    assert watching.knows(20, 1, 2)
    for number in (3, 4, 5):
        watching.cache.store(number)
    watching.take()
    assert watching.heard[10] == watching.heard[20]
    assert BlockRemoved(name(1)) in watching.heard[10]
    assert watching.knows(10, 2, 3, 4, 5)
    assert watching.knows(20, 2, 3, 4, 5)
    watching.take()
    assert not watching.heard


@pytest.mark.parametrize("forget", [lambda pool: pool.reset(4), BlockPool.unpublish_all])
def test_an_emptied_cache_is_told(forget: Callable[[BlockPool], object]):
    watching = Watching()
    watching.join(10)
    watching.cache.store(1)
    watching.take()
    forget(watching.cache.pool)
    watching.cache.store(2)
    watching.take()
    assert watching.heard[10][0] == CacheCleared()
    assert watching.knows(10, 2)


def test_events_are_kept_only_while_somebody_watches():
    watching = Watching()
    watching.join(10)
    watching.join(20)
    watching.take()
    watching.watchers.leave(10)
    watching.watchers.leave(30)
    watching.take()
    assert watching.cache.is_watched
    watching.watchers.leave(20)
    watching.take()
    assert not watching.cache.is_watched
    watching.cache.store(1)
    assert not watching.cache.take_cache_events()
    # A session joins and leaves before it gets any event.
    watching.join(40)
    watching.watchers.leave(40)
    watching.take()
    assert not watching.cache.is_watched
    watching.join(50)
    watching.take()
    assert watching.knows(50, 1)


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_large_cache_is_told_bit_by_bit_and_changes_meanwhile(is_cleared: bool):
    count = 2 * MAX_UNTOLD_AT_ONCE + 100
    watching = Watching(count)
    for number in range(count):
        watching.cache.store(number)
    watching.join(10)
    watching.take()
    assert len(watching.views[10]) == MAX_UNTOLD_AT_ONCE
    # Evicts the oldest blocks; some of them were announced already, some were not.
    for number in range(count, 2 * count - 100):
        watching.cache.store(number)
    if is_cleared:
        watching.cache.pool.unpublish_all()
    for _ in range(3):
        watching.take()
        assert len(watching.heard.get(10, ())) <= MAX_UNTOLD_AT_ONCE + 2 * count
    left = () if is_cleared else range(count - 100, 2 * count - 100)
    assert watching.knows(10, *left)
    watching.take()
    assert not watching.heard


def test_a_large_cache_is_told_in_messages_that_may_be_sent():
    events = [CacheCleared(), *(BlockStored(name(number)) for number in range(60_000))]
    messages = messages_of(events)
    assert len(messages) > 1
    assert all(message.ByteSize() <= SESSION_MESSAGE_BYTES for message in messages)
    told = [event for message in messages for event in message.cache_events]
    assert told[0].WhichOneof("event") == "cleared"
    assert [event.stored for event in told[1:]] == [name(number) for number in range(60_000)]
