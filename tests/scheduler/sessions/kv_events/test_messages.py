"""KV events for outside routers hold what a block's hash is made of, in vLLM's layout."""

import msgspec

from runtime.block_hashes import hash_prompt_blocks, scope_of
from runtime.kv_events import KvEventBatch
from scheduler.core.messages import BlockContent, BlockRemoved, BlockStored, CacheCleared
from scheduler.sessions.kv_events.publisher import kv_events, outside_hash

FIRST, SECOND, THIRD = hash_prompt_blocks([1, 2, 3, 4, 5, 6], 2, scope_of(""))


def stored(block_hash: bytes, parent: bytes | None, *token_ids: int, **content: object) -> BlockStored:
    return BlockStored(block_hash, BlockContent(parent, token_ids, **({"cache_salt": ""} | content)))  # type: ignore[arg-type]


def test_blocks_of_one_sequence_are_one_event_and_others_are_not() -> None:
    events = kv_events([stored(FIRST, None, 1, 2), stored(SECOND, FIRST, 3, 4), stored(THIRD, FIRST, 5, 6)])
    first, second, third = map(outside_hash, (FIRST, SECOND, THIRD))
    found = [(each.block_hashes, each.parent_block_hash, each.token_ids) for each in events]  # type: ignore[union-attr]
    assert found == [([first, second], None, [1, 2, 3, 4]), ([third], first, [5, 6])]


def test_order_is_kept_and_unknown_contents_are_left_out() -> None:
    events = kv_events(
        [CacheCleared(), BlockStored(THIRD), stored(FIRST, None, 1, 2), BlockRemoved(SECOND), BlockRemoved(FIRST)]
    )
    assert [type(event).__name__ for event in events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert events[2].block_hashes == [outside_hash(SECOND), outside_hash(FIRST)]  # type: ignore[union-attr]


def test_a_removal_between_parts_of_a_sequence_parts_its_events() -> None:
    events = kv_events([stored(FIRST, None, 1, 2), BlockRemoved(THIRD), stored(SECOND, FIRST, 3, 4)])
    assert len(events) == 3


def test_the_salt_is_a_key_of_the_first_block_and_items_of_the_blocks_they_start_in() -> None:
    (event,) = kv_events(
        [
            stored(FIRST, None, 1, 2, cache_salt="tenant"),
            stored(SECOND, FIRST, 3, 4, cache_salt="tenant", items=((b"\x01\xff", 1),)),
            stored(THIRD, SECOND, 5, 6, cache_salt="tenant"),
        ]
    )
    assert event.extra_keys == [("tenant",), (("01ff", 1),), None]  # type: ignore[union-attr]


def test_the_bytes_are_those_of_vllms_own_structs() -> None:
    """Written out after its vllm.distributed.kv_events: batches are arrays, events maps with their type's name."""
    events = kv_events([stored(FIRST, None, 1, 2), BlockRemoved(FIRST), CacheCleared()])
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(KvEventBatch(1.5, events, 3)))
    name = int.from_bytes(FIRST, "big") & (2**64 - 1)
    assert data == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [name],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]
