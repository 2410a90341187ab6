"""The union of replicas' caches changes when the first replica stores a block, and when the last one drops it."""

import random

from router.compat.kv_relay import Block, CacheUnion
from runtime.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


def stored(*hashes: int, parent: int | None = None, keys: list | None = None) -> BlockStored:
    token_ids = [token for each in hashes for token in (each, each)]
    return BlockStored(list(hashes), parent, token_ids, 2, None, "GPU", None, keys)


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU")


def test_a_block_is_told_once_and_ends_with_its_last_holder() -> None:
    union = CacheUnion()
    assert union.apply(0, [stored(1, 2)]) == [Block(1, None, (1, 1)), Block(2, 1, (2, 2))]
    assert union.apply(1, [stored(1, 2), stored(3, parent=2)]) == [Block(3, 2, (3, 3))]
    assert union.apply(0, [removed(1), removed(2)]) == []
    assert union.apply(1, [removed(2)]) == [2]
    assert union.apply(0, [stored(9)]) == [Block(9, None, (9, 9))]
    assert union.apply(1, [AllBlocksCleared()]) == [1, 3]
    assert [block.block_hash for block in union.blocks()] == [9]
    # What was removed before it was known, and what is told again.
    assert union.apply(0, [removed(77), stored(9)]) == []


def test_extra_keys_are_those_of_their_block() -> None:
    [first, second] = CacheUnion().apply(0, [stored(1, 2, keys=[("salt",), None])])
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert (first.extra_keys, second.extra_keys) == (("salt",), ())


def test_a_block_is_listed_after_the_one_before_it() -> None:
    draw = random.Random(4)
    union = CacheUnion()
    chains = [[100 * chain + index for index in range(6)] for chain in range(1, 5)]
    for _ in range(400):
        chain, replica = draw.choice(chains), draw.randrange(2)
        index = draw.randrange(6)
        if draw.random() < 0.5:
            union.apply(replica, [removed(chain[index])])
        else:
            union.apply(replica, [stored(chain[index], parent=chain[index - 1] if index else None)])
        listed = [block.block_hash for block in union.blocks()]
        assert len(set(listed)) == len(listed) == len(union)
        for block in union.blocks():
            if block.parent in listed:
                assert listed.index(block.parent) < listed.index(block.block_hash)
