"""Passes the changes of the replicas' prefix caches on to subscribers: as those of one cache, with numbers of its own.

The follower's thread runs while anyone subscribes. The memory that this takes is bounded: a subscriber that is too far
behind gets the whole state again.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.options import Options
from runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from router.compat.kv_follower import Follower, Source

# Batches that are kept for subscribers that come again.
_KEPT = 4096
# Blocks in a chunk of a snapshot.
_CHUNK = 512
# For replicas that answer late: they are followed, but a snapshot does not wait for them.
_CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class Block:
    """A block that can be found. parent: the hash of the block before it. extra_keys: what its hash is made of beside
    tokens (runtime.kv_events)."""

    block_hash: int
    parent: int | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] = ()


# A block that any replica has now and none had before, or the hash of one that no replica has any more.
Change = Block | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A place in a snapshot. index: of this chunk; count: chunks; blocks: in all of them; unknown_before: messages of
    schedulers that were never seen."""

    index: int
    count: int
    blocks: int
    unknown_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Changes with a number. seconds: since 1970. snapshot: set for a chunk of one, which lists all blocks."""

    number: int
    seconds: float
    changes: Sequence[Change]
    snapshot: Snapshot | None = None


class KvRelay:
    def __init__(self, options: Options) -> None:
        """options: those of the schedulers' kv_events_endpoint."""
        self._options = options
        self._union = CacheUnion()
        self._kept: deque[Batch] = deque(maxlen=_KEPT)
        # Greater than any number before a restart of this router: there are fewer than a million batches a second.
        self._last = time.time_ns() // 1000
        self._num_unknown = 0
        self._changed = asyncio.Event()
        self._is_caught_up = asyncio.Event()
        self._num_subscribers = 0
        self._follower: Follower | None = None

    @property
    def is_there(self) -> bool:
        """True if the schedulers publish anything."""
        return bool(self._options.kv_events_endpoint)

    async def batches(self, start: int) -> AsyncGenerator[Batch, None]:
        """Yields the state in chunks, and then changes as they come. start: the first number that is wanted, from an
        earlier call: if all since then is kept, only changes come; 0: the state."""
        assert self.is_there
        self._join()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._is_caught_up.wait()
            is_known, position = start > 0 and self._is_kept(start), start - 1
            while True:
                if not is_known:
                    chunks, position = self._snapshot(), self._last
                    for chunk in chunks:
                        yield chunk
                while (is_known := self._is_kept(position + 1)) and position < self._last:
                    position += 1
                    yield self._kept[position - self._kept[0].number]
                if is_known:
                    changed = self._changed
                    await changed.wait()
        finally:
            self._leave()

    def _is_kept(self, number: int) -> bool:
        """Returns True if a subscriber that has all before this number needs no snapshot."""
        first = self._kept[0].number if self._kept else self._last + 1
        return first <= number <= self._last + 1

    def _snapshot(self) -> list[Batch]:
        blocks = list(self._union.blocks())
        parts = [blocks[begin : begin + _CHUNK] for begin in range(0, len(blocks), _CHUNK)] or [[]]
        first, now = self._last - len(parts) + 1, time.time()
        return [
            Batch(
                number=first + index,
                seconds=now,
                changes=part,
                snapshot=Snapshot(index=index, count=len(parts), blocks=len(blocks), unknown_before=self._num_unknown),
            )
            for index, part in enumerate(parts)
        ]

    def _take(
        self,
        follower: "Follower",
        replica: int,
        events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared],
        num_missing: int,
    ) -> None:
        if follower is not self._follower:
            # One that was stopped, and had not noticed.
            return
        self._num_unknown += num_missing
        changes = self._union.apply(replica, events)
        if not changes:
            return
        self._last += 1
        self._kept.append(Batch(number=self._last, seconds=time.time(), changes=changes))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- The thread

    def _join(self) -> None:
        self._num_subscribers += 1
        if self._follower is not None:
            return
        # Imports ZeroMQ, which other routers do without.
        from router.compat.kv_follower import Follower

        loop = asyncio.get_running_loop()
        # Caches may have changed since an earlier thread stopped.
        self._union, self._num_unknown, self._is_caught_up = CacheUnion(), 0, asyncio.Event()
        self._kept.clear()
        self._last = max(self._last + 1, time.time_ns() // 1000)
        is_caught_up = self._is_caught_up
        follower = self._follower = Follower(
            self._sources(),
            self._options.kv_events_topic,
            lambda replica, events, num_missing: loop.call_soon_threadsafe(
                self._take, follower, replica, events, num_missing
            ),
            lambda: loop.call_soon_threadsafe(is_caught_up.set),
        )
        follower.start()

    def _leave(self) -> None:
        self._num_subscribers -= 1
        if not self._num_subscribers and self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _sources(self) -> "list[Source]":
        from router.compat.kv_follower import Source

        options = self._options
        sources = []
        for replica in range(options.data_parallel_size):
            host = options.scheduler_address(replica).removeprefix("dns:///").rpartition(":")[0]
            if host.startswith("unix"):
                host = "127.0.0.1"
            endpoint, replay = (_reachable(each, host) for each in options.kv_events_endpoints(replica))
            sources.append(Source(replica, endpoint, replay))
        return sources


def _reachable(endpoint: str, host: str) -> str:
    """Replaces an address on which a scheduler listens everywhere by the scheduler's own."""
    for anywhere in ("tcp://*:", "tcp://0.0.0.0:"):
        if endpoint.startswith(anywhere):
            return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    return endpoint


class CacheUnion:
    """The union of several replicas' prefix caches: what an outside router may expect to find at the cluster."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        # The blocks of each replica.
        self._held: dict[int, set[int]] = {}
        self._num_holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, replica: int, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> list[Change]:
        """Applies a replica's events, in order. Returns what changes in the union."""
        changes: list[Change] = []
        held = self._held.setdefault(replica, set())
        for event in events:
            match event:
                case BlockStored():
                    changes += [block for block in _blocks_of(event) if self._store(held, block)]
                case BlockRemoved():
                    changes += [each for each in event.block_hashes if self._remove(held, each)]
                case AllBlocksCleared():
                    changes += [each for each in list(held) if self._remove(held, each)]
        return changes

    def blocks(self) -> Iterator[Block]:
        """Yields all blocks, each after the one before it if that is there."""
        told: set[int] = set()
        for block in self._blocks.values():
            chain = []
            while block.block_hash not in told:
                chain.append(block)
                told.add(block.block_hash)
                parent = None if block.parent is None else self._blocks.get(block.parent)
                if parent is None:
                    break
                block = parent
            yield from reversed(chain)

    def _store(self, held: set[int], block: Block) -> bool:
        """Returns True if no replica had it."""
        if block.block_hash in held:
            return False
        held.add(block.block_hash)
        count = self._num_holders[block.block_hash] = self._num_holders.get(block.block_hash, 0) + 1
        if count > 1:
            return False
        self._blocks[block.block_hash] = block
        return True

    def _remove(self, held: set[int], block_hash: int) -> bool:
        """Returns True if no replica has it any more."""
        if block_hash not in held:
            return False
        held.discard(block_hash)
        self._num_holders[block_hash] -= 1
        if self._num_holders[block_hash]:
            return False
        del self._num_holders[block_hash], self._blocks[block_hash]
        return True


def _blocks_of(event: BlockStored) -> Iterator[Block]:
    parent, size = event.parent_block_hash, event.block_size
    for index, block_hash in enumerate(event.block_hashes):
        keys = event.extra_keys[index] if event.extra_keys is not None else None
        yield Block(block_hash, parent, tuple(event.token_ids[index * size : (index + 1) * size]), tuple(keys or ()))
        parent = block_hash
