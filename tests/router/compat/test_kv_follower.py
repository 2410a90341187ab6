"""The follower of a publisher delivers each message once, in order, and forgets what it cannot be sure of."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from router.compat.kv_follower import Event, Follower, Source
from runtime.kv_events import END, AllBlocksCleared, BlockRemoved, KvEventBatch

CLEARED = AllBlocksCleared()


class Publisher:
    """A publisher whose numbers and memory a test chooses. It answers requests for replays on a thread."""

    def __init__(self, context: zmq.Context, directory: Path) -> None:
        self.source = Source(3, f"ipc://{directory}/kv", f"ipc://{directory}/replay")
        self._published: zmq.Socket = context.socket(zmq.XPUB)
        self._published.bind(self.source.endpoint)
        self._replay: zmq.Socket = context.socket(zmq.ROUTER)
        self._replay.bind(self.source.replay_endpoint)
        self.kept: dict[int, bytes] = {}
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        """A message that is sent before is lost."""
        assert self._published.poll(20_000)
        assert self._published.recv() == b"\x01topic"

    def publish(self, number: int, seconds: float, *events: Event, is_sent: bool = True, is_kept: bool = True) -> None:
        payload = msgspec.msgpack.encode(KvEventBatch(seconds, list(events), 3))
        if is_kept:
            self.kept[number] = payload
        if is_sent:
            self._published.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join()
        for each in (self._published, self._replay):
            each.close(linger=0)

    def _answer(self) -> None:
        while not self._is_ending.is_set():
            if not self._replay.poll(50):
                continue
            identity, _, first = self._replay.recv_multipart()
            for number, payload in sorted(self.kept.items()):
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart([identity, b"", b"topic", number.to_bytes(8, "big"), payload])
            self._replay.send_multipart([identity, b"", b"topic", END, b""])


class Delivered:
    def __init__(self) -> None:
        self.events: list[tuple[int, list[Event], int]] = []
        self._changed = threading.Condition()

    def add(self, replica: int, events: Sequence[Event], num_missing: int) -> None:
        with self._changed:
            self.events.append((replica, list(events), num_missing))
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[list[tuple[int, list[Event], int]]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), 20), self.events


def removed(number: int) -> BlockRemoved:
    """An event that says which message it was in."""
    return BlockRemoved([number], "GPU")


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Publisher, Delivered]]:
    with zmq.Context() as context:
        publisher, delivered, caught_up = Publisher(context, tmp_path), Delivered(), threading.Event()
        publisher.publish(0, 1.0, CLEARED)
        follower = Follower([publisher.source], "topic", delivered.add, caught_up.set)
        follower.start()
        try:
            assert caught_up.wait(20)
            publisher.wait_for_subscriber()
            assert delivered.events == [(3, [CLEARED], 0)]
            yield publisher, delivered
        finally:
            follower.stop()
            follower.join(20)
            publisher.close()
        assert not follower.is_alive()


def test_messages_that_were_lost_are_replayed_before_later_ones(followed: tuple[Publisher, Delivered]) -> None:
    publisher, delivered = followed
    for number in range(1, 9):
        publisher.publish(number, 1.0 + number, removed(number), is_sent=number in (1, 5, 8))
    delivered.wait_for(lambda events: len(events) >= 9)
    assert delivered.events[1:] == [(3, [removed(number)], 0) for number in range(1, 9)]


def test_what_no_replay_has_makes_it_forget(followed: tuple[Publisher, Delivered]) -> None:
    publisher, delivered = followed
    publisher.publish(1, 2.0, removed(1))
    delivered.wait_for(lambda events: len(events) == 2)
    publisher.publish(2, 3.0, removed(2), is_sent=False, is_kept=False)
    publisher.publish(3, 3.0, removed(3), is_sent=False, is_kept=False)
    publisher.publish(4, 4.0, removed(4))
    delivered.wait_for(lambda events: len(events) == 4)
    assert delivered.events[2:] == [(3, [CLEARED], 0), (3, [removed(4)], 2)]


def test_a_message_that_cannot_be_read_counts_as_lost(followed: tuple[Publisher, Delivered]) -> None:
    publisher, delivered = followed
    publisher.kept[1] = b"no batch"
    publisher.publish(2, 3.0, removed(2))
    delivered.wait_for(lambda events: len(events) == 4)
    assert delivered.events[1:] == [(3, [CLEARED], 0), (3, [], 1), (3, [removed(2)], 0)]


def test_a_scheduler_that_starts_anew_is_noticed(followed: tuple[Publisher, Delivered]) -> None:
    publisher, delivered = followed
    for number in range(1, 4):
        publisher.publish(number, 1.0 + number, removed(number))
    delivered.wait_for(lambda events: len(events) == 4)
    publisher.kept.clear()
    publisher.publish(0, 20.0, CLEARED, is_sent=False)
    publisher.publish(1, 21.0, removed(100))
    delivered.wait_for(lambda events: len(events) == 7)
    assert delivered.events[4:] == [(3, [CLEARED], 0), (3, [CLEARED], 0), (3, [removed(100)], 0)]
