"""Events of prefix caches in the layout of vLLM's ZeroMQ publisher (vllm.distributed.kv_events of 0.33, msgspec).

Schedulers publish them for outside routers that know vLLM's events (llm-d, Dynamo and others).
"""

from typing import Any

import msgspec

# The number in the message that ends a replay.
END = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES = 8


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
