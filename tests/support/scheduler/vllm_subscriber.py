"""A subscriber of KV events, written from vLLM's documentation and example: it knows nothing of Octavo."""

from typing import Any

import msgspec
import zmq

Hash = bytes | int


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class VllmSubscriber:
    """Follows one publisher. blocks: those that it holds, with the token ids of each and the block before it."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.blocks: dict[Hash, tuple[tuple[int, ...], Hash | None]] = {}
        self.batches: list[KVEventBatch] = []
        self.last = -1
        self.num_missed = 0
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._context = zmq.Context()
        self._published: zmq.Socket = self._context.socket(zmq.SUB)
        self._published.connect(endpoint)
        self._published.setsockopt_string(zmq.SUBSCRIBE, topic)
        # A REQ socket takes one answer, and a replay is many.
        self._replay: zmq.Socket = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def has_more(self) -> bool:
        return bool(self._published.poll(200))

    def read(self, timeout_s: float = 5.0, *, drop: bool = False) -> int:
        """Takes the next message, after those that it lacks, and returns its number. drop: loses it."""
        assert self._published.poll(round(timeout_s * 1000)), "no message"
        _, number, payload = self._published.recv_multipart()
        found = int.from_bytes(number, "big")
        if drop:
            return found
        if found > self.last + 1:
            self.num_missed += found - self.last - 1
            self.catch_up()
        if found > self.last:
            self._apply(found, payload)
        return found

    def catch_up(self) -> None:
        """Has all messages replayed that it lacks."""
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(5000), "no replay"
            _, _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            self._apply(int.from_bytes(number, "big"), payload)

    def _apply(self, number: int, payload: bytes) -> None:
        assert number == self.last + 1
        self.last = number
        batch = self._decoder.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for each in event.block_hashes:
                        del self.blocks[each]
                case AllBlocksCleared():
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        for index, each in enumerate(event.block_hashes):
            self.blocks[each] = (tuple(event.token_ids[index * size : (index + 1) * size]), parent)
            parent = each
