"""The items of live requests, by name: their files stay here so that they can be sent to another replica."""

import math
from collections.abc import Sequence
from typing import Self

from router.errors import RouterFull
from router.request.media.read import ReadItem
from router.security.identity import Identity
from runtime.shares import SharedRoom

_Key = tuple[str, bytes]


class _Entry:
    def __init__(self, item: ReadItem) -> None:
        self.item = item
        self.num_holders = 0


class ItemStore:
    """Holds an item as long as a request does. Tenants share the bytes (runtime.shares), and see only their own items:
    to know a file's digest is not to have it."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: option item_memory."""
        self._room = SharedRoom(max_bytes)
        self._entries: dict[_Key, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of the items held, and of those that are being read."""
        return self._room.total

    def find(self, tenant: str, name: bytes) -> ReadItem | None:
        entry = self._entries.get((tenant, name))
        return None if entry is None else entry.item


class ItemLease:
    """The items of one request. Closed when it ends."""

    def __init__(self, store: ItemStore, identity: Identity) -> None:
        self._store, self._identity = store, identity
        # Bytes of items that are being read.
        self._reserved = 0
        self._names: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def reserve(self, num_bytes: int) -> None:
        """Takes room for items before they are read. Raises RouterFull."""
        room, tenant = self._store._room, self._identity.tenant
        # Without keys all callers are one, which may take everything.
        if not room.take(tenant, num_bytes, self._identity.weight if tenant else math.inf):
            raise RouterFull(
                f"items have {num_bytes} bytes, and this router holds {room.total} bytes of items already, "
                f"{room.of(tenant)} of them of this caller: a caller may have as many as are free of "
                f"item_memory={room.size} bytes; try again later or at another router"
            )
        self._reserved += num_bytes

    def keep(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """Holds items that were read, in place of what was reserved for them; an item that is here already is taken
        from here, so that its bytes are there once."""
        room, tenant, kept = self._store._room, self._identity.tenant, list[ReadItem]()
        room.give_back(tenant, self._reserved)
        self._reserved = 0
        for item in items:
            key = tenant, item.packed.name
            entry = self._store._entries.get(key)
            if entry is None:
                entry = self._store._entries[key] = _Entry(item)
                room.add(tenant, item.packed.num_bytes)
            entry.num_holders += 1
            self._names.append(item.packed.name)
            kept.append(entry.item)
        return kept

    def find(self, name: bytes) -> ReadItem | None:
        """Holds an item that the caller's other requests hold; None if there is none of this name."""
        found = self._store.find(self._identity.tenant, name)
        return None if found is None else self.keep([found])[0]

    def close(self) -> None:
        """Lets go of everything. May be called again."""
        room, tenant, entries = self._store._room, self._identity.tenant, self._store._entries
        if self._reserved:
            room.give_back(tenant, self._reserved)
            self._reserved = 0
        for name in self._names:
            entry = entries[tenant, name]
            entry.num_holders -= 1
            if not entry.num_holders:
                del entries[tenant, name]
                room.give_back(tenant, entry.item.packed.num_bytes)
        self._names = []
