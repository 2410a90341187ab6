"""Converts events of the prefix cache to the layout of runtime.kv_events.

Hashes are integers, as vLLM's are by default: the last 8 bytes of the block's hash, big-endian.
"""

from collections.abc import Iterable
from typing import Any

from runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler.core import messages as core

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
