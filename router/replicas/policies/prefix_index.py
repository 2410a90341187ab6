"""Tracks which replicas hold which blocks in their prefix caches, by block hash."""

from collections.abc import Iterable, Sequence

from protos.scheduler_pb2 import CacheEvent

_NAME_BYTES = 32


class PrefixIndex:
    """Index from block hash to replicas. Takes some 200 bytes a block, over all replicas."""

    def __init__(self) -> None:
        # In tokens, the same for all replicas; valid once one is there.
        self.block_size = 1
        # Bit i: replica i has the block, or is expected to.
        self._holders: dict[bytes, int] = {}
        self._replicas: dict[int, _Known] = {}

    def add(self, replica: int, *, block_size: int, max_blocks: int) -> None:
        """Adds a replica that has come, or come back, with an empty cache. max_blocks: bounds what its events may add,
        so that they can't fill this router's memory."""
        self.remove(replica)
        self.block_size = block_size
        self._replicas[replica] = _Known(max_blocks)

    def resize(self, replica: int, max_blocks: int) -> None:
        """Sets its number of blocks, which may change when its workers restart."""
        self._replicas[replica].max_blocks = max_blocks

    def remove(self, replica: int) -> None:
        """Removes a replica that has gone."""
        if replica in self._replicas:
            self._clear(replica)
            del self._replicas[replica]

    def apply(self, replica: int, events: Iterable[CacheEvent]) -> None:
        """Takes in a replica's cache events, in the order of their arrival.

        Raises ValueError for events that break the protocol.
        """
        known = self._replicas[replica]
        for event in events:
            match event.WhichOneof("event"):
                case "stored":
                    if len(event.stored) != _NAME_BYTES:
                        raise ValueError(f"stored: {len(event.stored)} bytes; a block's name has {_NAME_BYTES}")
                    known.stored.add(event.stored)
                    known.expected.pop(event.stored, None)
                    self._set(replica, event.stored)
                    if len(known.stored) > known.max_blocks:
                        raise ValueError(f"stored: more than the {known.max_blocks} blocks that the replica has")
                case "removed":
                    known.stored.discard(event.removed)
                    known.expected.pop(event.removed, None)
                    self._unset(replica, event.removed)
                case "cleared":
                    self._clear(replica)
                case _:
                    raise ValueError("a cache event holds none of the kinds known here")

    def expect(self, replica: int, names: Sequence[bytes]) -> None:
        """Notes that a prompt of these blocks is on its way to a replica. Old expectations make way for later ones."""
        known = self._replicas[replica]
        for name in names:
            if name not in known.stored:
                known.expected.pop(name, None)
                known.expected[name] = None
                self._set(replica, name)
        while len(known.expected) > known.max_blocks:
            oldest = next(iter(known.expected))
            del known.expected[oldest]
            self._unset(replica, oldest)

    def num_cached_blocks(self, names: Sequence[bytes]) -> dict[int, int]:
        """Returns how many leading blocks of a prompt each replica has, if any. names: its runtime.block_hashes."""
        found: dict[int, int] = {}
        have_all = -1
        for count, name in enumerate(names):
            have_it = have_all & self._holders.get(name, 0)
            if count:
                _put(found, have_all & ~have_it, count)
            have_all = have_it
            if not have_all:
                return found
        if names:
            _put(found, have_all, len(names))
        return found

    def num_known(self, replica: int) -> int:
        """Number of blocks that its events have reported."""
        return len(self._replicas[replica].stored)

    def _set(self, replica: int, name: bytes) -> None:
        self._holders[name] = self._holders.get(name, 0) | 1 << replica

    def _unset(self, replica: int, name: bytes) -> None:
        holders = self._holders.get(name, 0) & ~(1 << replica)
        if holders:
            self._holders[name] = holders
        else:
            self._holders.pop(name, None)

    def _clear(self, replica: int) -> None:
        known = self._replicas[replica]
        for name in (*known.stored, *known.expected):
            self._unset(replica, name)
        known.stored.clear()
        known.expected.clear()


class _Known:
    """The blocks that one replica holds, as far as is known."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.stored: set[bytes] = set()
        # Oldest first.
        self.expected: dict[bytes, None] = {}


def _put(found: dict[int, int], replicas: int, count: int) -> None:
    """Sets found[i] to `count` for each bit i of `replicas`."""
    while replicas:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = count
        replicas ^= lowest
