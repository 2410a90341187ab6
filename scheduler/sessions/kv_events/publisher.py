"""Publishes the prefix cache's changes over ZeroMQ as vLLM does: a PUB socket, and a ROUTER socket that replays.

A message is (topic, sequence number of 8 bytes, batch). A subscriber that finds a gap sends the first number that it
lacks to the other socket, from a REQ or DEALER socket, and gets what is kept from there on, then an end marker.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from configs.options import Options
from runtime.grpc_setup.server import is_loopback
from runtime.kv_events import END, NUMBER_BYTES, AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from runtime.wire import KV_EVENTS_WAITING
from scheduler.core import messages as core
from scheduler.core.messages import CacheEvent
from scheduler.sockets import AddressError, path_of

# vLLM's word for the cache that steps read, on every device.
_MEDIUM = "GPU"


def outside_hash(block_hash: bytes) -> int:
    """A block's hash as outside routers see it."""
    return int.from_bytes(block_hash[-8:], "big")


def kv_events(changes: Iterable[core.CacheEvent]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Converts changes, in order; neighbours of one kind are joined. Blocks whose content is not known are left out:
    they were stored before anything was told."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    tail: bytes | None = None
    for change in changes:
        last = events[-1] if events else None
        match change:
            case core.BlockStored(block_hash, content):
                if content is None:
                    continue
                if not (isinstance(last, BlockStored) and tail is not None and content.parent == tail):
                    parent = None if content.parent is None else outside_hash(content.parent)
                    last = BlockStored([], parent, [], len(content.token_ids), None, _MEDIUM, None)
                    events.append(last)
                _append(last, block_hash, content)
                tail = block_hash
            case core.BlockRemoved(block_hash):
                if not isinstance(last, BlockRemoved):
                    last = BlockRemoved([], _MEDIUM)
                    events.append(last)
                last.block_hashes.append(outside_hash(block_hash))
            case core.CacheCleared():
                events.append(AllBlocksCleared())
    return events


def _append(stored: BlockStored, block_hash: bytes, content: core.BlockContent) -> None:
    keys: tuple[Any, ...] = tuple((name.hex(), first) for name, first in content.items)
    if content.parent is None and content.cache_salt:
        keys += (content.cache_salt,)
    if keys and stored.extra_keys is None:
        stored.extra_keys = [None for _ in stored.block_hashes]
    if stored.extra_keys is not None:
        stored.extra_keys.append(keys or None)
    stored.block_hashes.append(outside_hash(block_hash))
    stored.token_ids += content.token_ids


log = logging.getLogger("octavo.scheduler.sessions.kv_events")

_MAX_REQUEST_BYTES = 1024


class KvEventPublisher(threading.Thread):
    """Publishes from `start_bound` until `stop`. Batches that its thread can't keep up with are left out: subscribers
    see a gap that no replay fills, and forget what they know."""

    @classmethod
    def of(cls, options: Options, replica: int) -> "KvEventPublisher | None":
        """The publisher of a replica; None if events are off."""
        endpoint, replay = options.kv_events_endpoints(replica)
        if not endpoint:
            return None
        return cls(endpoint, replay, replica, topic=options.kv_events_topic, buffer=options.kv_events_buffer_steps)

    def __init__(self, endpoint: str, replay_endpoint: str, replica: int, *, topic: str, buffer: int) -> None:
        """replay_endpoint: empty for none. buffer: the number of batches that are kept for replays."""
        super().__init__(name="kv-events", daemon=True)
        self._endpoint, self._replay_endpoint, self._replica = endpoint, replay_endpoint, replica
        self._topic = topic.encode()
        self._bound: Future[None] = Future()
        self._wake = os.eventfd(0)
        # Batches that wait: (time, changes), None for a batch that had no place.
        self._waiting: deque[tuple[float, Sequence[CacheEvent]] | None] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._next_number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._is_ending = False
        self._is_behind = False

    def start_bound(self) -> None:
        """Starts the thread; returns once its sockets are bound. Raises AddressError."""
        for endpoint in filter(None, (self._endpoint, self._replay_endpoint)):
            if path_of(endpoint) is None and not is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0]):
                log.warning(
                    "kv_events_endpoint: %s is open to other hosts, and events hold the token ids of prompts; use a "
                    "private network",
                    endpoint,
                )
        self.start()
        self._bound.result()

    def publish(self, changes: Sequence[CacheEvent]) -> None:
        """Takes the changes of a step. For the step loop's thread."""
        is_full = len(self._waiting) >= KV_EVENTS_WAITING
        if is_full and not self._is_behind:
            log.warning("%d batches of KV events wait: further ones are left out", KV_EVENTS_WAITING)
        self._is_behind = is_full
        self._waiting.append(None if is_full else (time.time(), changes))
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends and joins the thread, after it has published what waits."""
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        self.join()
        os.close(self._wake)

    # --- The thread

    def run(self) -> None:
        with zmq.Context() as context:
            try:
                published, replay = self._bind(context)
            except AddressError as error:
                self._bound.set_exception(error)
                context.destroy(linger=0)
                return
            self._bound.set_result(None)
            try:
                self._serve(published, replay)
            finally:
                # A second for subscribers to get the last batches.
                context.destroy(linger=1000)

    def _bind(self, context: zmq.Context) -> tuple[zmq.Socket, zmq.Socket | None]:
        """Raises AddressError."""
        published: zmq.Socket = context.socket(zmq.PUB)
        published.set_hwm(KV_EVENTS_WAITING)
        _bind_one(published, "kv_events_endpoint", self._endpoint)
        if not self._replay_endpoint:
            return published, None
        replay: zmq.Socket = context.socket(zmq.ROUTER)
        replay.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        # ZeroMQ counts messages as read only in halves of the mark: twice a whole replay and its end have room.
        replay.setsockopt(zmq.SNDHWM, 2 * ((self._kept.maxlen or 0) + 1))
        _bind_one(replay, "kv_events_replay_endpoint", self._replay_endpoint)
        return published, replay

    def _serve(self, published: zmq.Socket, replay: zmq.Socket | None) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if replay is not None:
            poller.register(replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._waiting:
                    self._publish_one(published, self._waiting.popleft())
                if self._is_ending:
                    return
            if replay is not None and replay in ready:
                self._replay(replay, replay.recv_multipart())

    def _publish_one(self, published: zmq.Socket, batch: tuple[float, Sequence[CacheEvent]] | None) -> None:
        events = kv_events(batch[1]) if batch is not None else []
        if batch is not None and not events:
            return
        number = self._next_number.to_bytes(NUMBER_BYTES, "big")
        self._next_number += 1
        if batch is not None:
            payload = self._encoder.encode(KvEventBatch(batch[0], events, self._replica))
            self._kept.append((number, payload))
            published.send_multipart((self._topic, number, payload))

    def _replay(self, replay: zmq.Socket, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            log.warning(
                "kv_events_replay_endpoint: a request has %d frames: send an empty one and a number of 8 bytes",
                len(frames) - 1,
            )
            return
        peer, _, first = frames
        # Numbers of 8 bytes, big-endian, sort as bytes.
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((peer, b"", self._topic, number, payload))
        replay.send_multipart((peer, b"", b"", END, b""))


def _bind_one(socket: zmq.Socket, option: str, endpoint: str) -> None:
    """Raises AddressError."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise AddressError(f"{option}: cannot listen on {endpoint}: {error.strerror}; name another one") from None
    if (path := path_of(endpoint)) is not None:
        path.chmod(0o600)
