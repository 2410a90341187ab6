"""Reads what schedulers publish of their prefix caches, on a thread, and has replayed what it lacks."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from runtime.kv_events import END, NUMBER_BYTES, AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from runtime.wire import KV_EVENTS_WAITING

log = logging.getLogger("octavo.router.compat")

Event = BlockStored | BlockRemoved | AllBlocksCleared

_POLL_MS = 200
_REPLAY_MS = 2000


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replica publishes, and where it replays; empty if it does not."""

    replica: int
    endpoint: str
    replay_endpoint: str


class Follower(threading.Thread):
    """Follows all sources until `stop`, or until `deliver` raises RuntimeError."""

    def __init__(
        self,
        sources: Sequence[Source],
        topic: str,
        deliver: Callable[[int, Sequence[Event], int], object],
        caught_up: Callable[[], object],
    ) -> None:
        """deliver: gets a replica, its events, and how many of its messages before them were never seen. caught_up:
        called once all that is kept has been delivered."""
        super().__init__(name="kv-relay", daemon=True)
        self._sources, self._topic, self._deliver, self._caught_up = sources, topic, deliver, caught_up
        self._is_ending = threading.Event()

    def stop(self) -> None:
        self._is_ending.set()

    def run(self) -> None:
        with zmq.Context() as context:
            try:
                followed = [_Followed(context, source, self._topic, self._deliver) for source in self._sources]
                poller = zmq.Poller()
                for each in followed:
                    poller.register(each.published, zmq.POLLIN)
                for each in followed:
                    each.replay()
                self._caught_up()
                while not self._is_ending.is_set():
                    ready = dict(poller.poll(_POLL_MS))
                    for each in followed:
                        if each.published in ready:
                            each.read()
            # The event loop that takes the events has been closed.
            except RuntimeError:
                pass
            finally:
                context.destroy(linger=0)


class _Followed:
    def __init__(
        self, context: zmq.Context, source: Source, topic: str, deliver: Callable[[int, Sequence[Event], int], object]
    ) -> None:
        self._source, self._deliver = source, deliver
        self._decoder = msgspec.msgpack.Decoder(KvEventBatch)
        self._last, self._last_time = -1, 0.0
        self.published: zmq.Socket = context.socket(zmq.SUB)
        self.published.set_hwm(KV_EVENTS_WAITING)
        self.published.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.published.connect(source.endpoint)
        self._replay: zmq.Socket | None = None
        if source.replay_endpoint:
            replay: zmq.Socket = context.socket(zmq.DEALER)
            # A replay of any length has room.
            replay.set_hwm(0)
            replay.connect(source.replay_endpoint)
            self._replay = replay

    def read(self) -> None:
        """Takes a message, after those that are missing before it."""
        _, number, payload = self.published.recv_multipart(zmq.NOBLOCK)
        found, batch = int.from_bytes(number, "big"), self._decoded(payload)
        if batch is not None and found <= self._last and batch.ts > self._last_time:
            # The scheduler has started anew.
            self._forget()
            self._last = -1
        if found > self._last + 1:
            self.replay()
        if found > self._last:
            self._take(found, batch)

    def replay(self) -> None:
        """Has all messages replayed that are missing and kept."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            self._replay.recv_multipart(zmq.NOBLOCK)
        self._replay.send_multipart([b"", (self._last + 1).to_bytes(NUMBER_BYTES, "big")], zmq.NOBLOCK)
        while self._replay.poll(_REPLAY_MS):
            *_, number, payload = self._replay.recv_multipart(zmq.NOBLOCK)
            if number == END:
                return
            self._take(int.from_bytes(number, "big"), self._decoded(payload))
        log.debug("replica %d: no replay of KV events at %s", self._source.replica, self._source.replay_endpoint)

    def _take(self, number: int, batch: KvEventBatch | None) -> None:
        """batch: None for one that cannot be read, which is as good as lost."""
        if number <= self._last:
            return
        num_missing = number - self._last - 1 + (batch is None)
        if num_missing:
            # They can't be had any more, and may have removed what is known.
            self._forget()
        self._last = number
        if batch is not None:
            self._last_time = batch.ts
        self._deliver(self._source.replica, [] if batch is None else batch.events, num_missing)

    def _decoded(self, payload: bytes) -> KvEventBatch | None:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("replica %d: KV events of another layout: %s", self._source.replica, error)
            return None

    def _forget(self) -> None:
        self._deliver(self._source.replica, [AllBlocksCleared()], 0)
