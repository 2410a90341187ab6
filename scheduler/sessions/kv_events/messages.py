"""Events of the prefix cache in the layout of vLLM's ZeroMQ publisher (vllm.distributed.kv_events of 0.33, msgspec).

Outside routers that know vLLM's events (llm-d, Dynamo and others) read these. Hashes are integers, as vLLM's are by
default: the last 8 bytes of the block's hash, big-endian.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from scheduler.core import messages as core

# vLLM's word for the cache that steps read, on every device.
_MEDIUM = "GPU"


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events. The tag is the class's name."""


class BlockStored(KvEvent):
    """Blocks that follow each other, from one sequence."""

    block_hashes: list[int]
    # The block before the first of these; None if there is none.
    parent_block_hash: int | None
    # The tokens of all these blocks, block_size for each.
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # For each block what its hash is made of beside tokens: (name, first token) of items that start in it, and a
    # sequence's cache_salt in its first block. None if there is nothing for any block.
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(KvEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KvEvent):
    """No block stored before can be found."""


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes of one step. ts: seconds since 1970. data_parallel_rank: the replica."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


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
