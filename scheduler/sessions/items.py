"""The bytes of items (images, videos) that routers send: assembled, verified, and kept while groups need them.

Two threads share the work. The gRPC thread assembles the parts of each Session and checks names (`IncomingItems`); the
step loop's thread keeps what is complete (`ItemStore`). `ItemMemory` bounds both together.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from protos import scheduler_pb2
from runtime.media.names import NAME_BYTES, item_name
from runtime.wire import STEP_MESSAGE_BYTES
from scheduler.sessions.commands import RefuseItem, StoreItem

# The largest item that a message to the workers has room for.
MOST_ITEM_BYTES = STEP_MESSAGE_BYTES - 4096
# Items that were refused lately, and why: the groups that name them are refused, too.
_MOST_REFUSED = 1024


class ProtocolError(ValueError):
    """The router broke the protocol of scheduler.proto, so its Session ends. The message names the field."""


class ItemMemory:
    """Bytes of items in this process. Each count has one thread that writes it; the other one only reads it."""

    def __init__(self, size: int) -> None:
        self.size = size
        # The gRPC thread's: of items that are still coming in.
        self.num_incoming = 0
        # The step loop's: of items that live groups need.
        self.num_pinned = 0

    @property
    def num_needed(self) -> int:
        return self.num_incoming + self.num_pinned

    def has_room(self, num_bytes: int) -> bool:
        """True if an item may come in: what is not needed can make way for it."""
        return self.num_needed + num_bytes <= self.size


class _Incoming:
    """An item of which some parts have come."""

    __slots__ = ("is_refused", "num_bytes", "num_received", "parts")

    def __init__(self, num_bytes: int, *, is_refused: bool) -> None:
        self.num_bytes, self.num_received = num_bytes, 0
        self.parts: list[bytes] = []
        # What comes of it is dropped.
        self.is_refused = is_refused


class IncomingItems:
    """The items that come in on one Session. For the gRPC thread."""

    def __init__(self, memory: ItemMemory) -> None:
        self._memory = memory
        self._incoming: dict[bytes, _Incoming] = {}

    def add(self, part: scheduler_pb2.ItemPart) -> list[StoreItem | RefuseItem]:
        """Takes the next part of an item; returns what the step loop must know. Raises ProtocolError."""
        name, commands = part.name, []
        incoming = self._incoming.get(name)
        if incoming is None:
            refusal = self._refusal(part)
            if refusal is not None:
                commands.append(refusal)
            incoming = self._incoming[name] = _Incoming(part.num_bytes, is_refused=refusal is not None)
            self._memory.num_incoming += 0 if incoming.is_refused else part.num_bytes
        if part.num_bytes != incoming.num_bytes:
            raise ProtocolError(f"item_part.num_bytes: {part.num_bytes} after {incoming.num_bytes} for the same item")
        incoming.num_received += len(part.data)
        if not part.data or incoming.num_received > incoming.num_bytes:
            raise ProtocolError(
                f"item_part.data: {len(part.data)} bytes make {incoming.num_received} of {incoming.num_bytes}"
            )
        if not incoming.is_refused:
            incoming.parts.append(part.data)
        if incoming.num_received == incoming.num_bytes:
            self._drop(name)
            if not incoming.is_refused:
                commands.append(_verified(name, b"".join(incoming.parts)))
        return commands

    def _refusal(self, part: scheduler_pb2.ItemPart) -> RefuseItem | None:
        if len(part.name) != NAME_BYTES:
            raise ProtocolError(f"item_part.name has {len(part.name)} bytes: it must have {NAME_BYTES}")
        if not part.num_bytes:
            raise ProtocolError("item_part.num_bytes is 0: an item has at least one byte")
        if part.num_bytes > MOST_ITEM_BYTES:
            message = (
                f"an item has {part.num_bytes} bytes, and a message to the workers has room for {MOST_ITEM_BYTES}: "
                "send a smaller one"
            )
            return RefuseItem(name=part.name, reason=scheduler_pb2.REJECT_REASON_INVALID, message=message)
        if part.num_bytes > self._memory.size:
            message = (
                f"an item has {part.num_bytes} bytes, and item_memory={self._memory.size / 2**30:g} GiB holds "
                f"{self._memory.size}: send a smaller one, or raise item_memory"
            )
            return RefuseItem(name=part.name, reason=scheduler_pb2.REJECT_REASON_INVALID, message=message)
        if not self._memory.has_room(part.num_bytes):
            message = (
                f"an item has {part.num_bytes} bytes, and those of other requests fill "
                f"item_memory={self._memory.size / 2**30:g} GiB: try again later or elsewhere"
            )
            return RefuseItem(name=part.name, reason=scheduler_pb2.REJECT_REASON_QUEUE_FULL, message=message)
        return None

    def close(self) -> None:
        """Drops what is not complete."""
        for name in list(self._incoming):
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        incoming = self._incoming.pop(name)
        if not incoming.is_refused:
            self._memory.num_incoming -= incoming.num_bytes


def _verified(name: bytes, data: bytes) -> StoreItem:
    if item_name(data) != name:
        raise ProtocolError(f"item_part.name is {name.hex()}, but the data of {len(data)} bytes has another name")
    return StoreItem(name=name, data=data)


class ItemStore:
    """The complete items. Those that live groups need stay; of the others, the least recently used go first. For the
    step loop's thread."""

    def __init__(self, memory: ItemMemory) -> None:
        self._memory = memory
        self._data: dict[bytes, bytes] = {}
        self._num_bytes = 0
        # The items that no group needs, least recently used first.
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()
        # How many groups need each item, whether it is here or not.
        self._pins: Counter[bytes] = Counter()
        # Those groups, by name of each item that is not here.
        self._lacking: dict[bytes, set[int]] = {}
        self._names: dict[int, frozenset[bytes]] = {}
        self._refused: OrderedDict[bytes, tuple[scheduler_pb2.RejectReason, str]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all items that are here."""
        return self._num_bytes

    def get(self, name: bytes) -> bytes | None:
        """The serialized ItemData; None if it is not here."""
        return self._data.get(name)

    def put(self, name: bytes, data: bytes) -> None:
        """Stores an item, whose name has been verified."""
        self._refused.pop(name, None)
        if name in self._data:
            return
        memory = self._memory
        while self._num_bytes + len(data) + memory.num_incoming > memory.size and self._unpinned:
            evicted, _ = self._unpinned.popitem(last=False)
            self._num_bytes -= len(self._data.pop(evicted))
        self._data[name] = data
        self._num_bytes += len(data)
        self._lacking.pop(name, None)
        if self._pins[name]:
            memory.num_pinned += len(data)
        else:
            self._unpinned[name] = None

    def refuse(self, name: bytes, reason: scheduler_pb2.RejectReason, message: str) -> list[int]:
        """Notes that an item was refused. Returns the groups that wait for it."""
        if name in self._data:
            return []
        self._refused[name] = reason, message
        self._refused.move_to_end(name)
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        return sorted(self._lacking.get(name, ()))

    def refusal(self, names: Iterable[bytes]) -> tuple[scheduler_pb2.RejectReason, str] | None:
        """The reason to refuse a group, because one of its items was refused; None if there is none."""
        return next((self._refused[name] for name in names if name in self._refused), None)

    def pin(self, group: int, names: Iterable[bytes]) -> list[bytes]:
        """Keeps the items of a group. Returns the names of those that are not here."""
        self._names[group] = frozenset(names)
        missing = []
        for name in sorted(self._names[group]):
            self._pins[name] += 1
            if (data := self._data.get(name)) is None:
                self._lacking.setdefault(name, set()).add(group)
                missing.append(name)
            elif self._pins[name] == 1:
                del self._unpinned[name]
                self._memory.num_pinned += len(data)
        return missing

    def unpin(self, group: int) -> None:
        """Lets go of the items of a group that has ended, if it has any."""
        for name in self._names.pop(group, ()):
            self._pins[name] -= 1
            if (waiting := self._lacking.get(name)) is not None:
                waiting.discard(group)
                if not waiting:
                    del self._lacking[name]
            if not self._pins[name]:
                del self._pins[name]
                if (data := self._data.get(name)) is not None:
                    self._memory.num_pinned -= len(data)
                    self._unpinned[name] = None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._data)

    def check_integrity(self) -> None:
        """Asserts that all counts agree."""
        assert self._num_bytes == sum(map(len, self._data.values()))
        assert self._pins == Counter(name for names in self._names.values() for name in names)
        assert self._unpinned.keys() == self._data.keys() - self._pins.keys()
        assert self._memory.num_pinned == sum(len(data) for name, data in self._data.items() if name in self._pins)
        assert self._lacking == {
            name: {group for group, names in self._names.items() if name in names}
            for name in self._pins.keys() - self._data.keys()
        }
