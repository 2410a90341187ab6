"""Blocks: their holders, their contents, and which are evicted first."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.state.blocks import BlockPool, num_blocks_for


def test_the_null_block_is_never_given_out():
    pool = BlockPool(3)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_available == 0


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_num_blocks_for(num_tokens: int, num_blocks: int):
    assert num_blocks_for(num_tokens, 4) == num_blocks


def test_published_blocks_stay_findable_until_they_are_needed():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.publish(first, b"first")
    pool.release([first, second])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 0)
    # Free blocks are taken before cached ones.
    pool.take(2)
    assert pool.find(b"first") == first
    assert pool.take(1) == [first]
    assert pool.find(b"first") is None


def test_the_longest_unused_prefix_goes_first_and_its_tail_before_its_head():
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for block in old + new:
        pool.publish(block, str(block).encode())
    pool.release(old)
    pool.release(new)
    assert [pool.take(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_block_held_again_is_no_longer_the_one_to_go():
    pool = BlockPool(2)
    first, second = pool.take(1) + pool.take(1)
    for block in (first, second):
        pool.publish(block, str(block).encode())
        pool.release([block])
    pool.hold([first])
    pool.release([first])
    assert pool.take(2) == [first, second] or pool.find(str(second).encode()) is None
    pool.check_integrity(Counter({first: 1, second: 1}))


def test_a_shared_block_is_free_only_when_its_last_holder_leaves():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_fits_counts_cached_blocks_that_are_to_be_shared():
    pool = BlockPool(3)
    shared = pool.take(1)
    pool.publish(shared[0], b"shared")
    pool.release(shared)
    # Once it is shared, it is held and can't be taken.
    assert pool.fits(shared, 2)
    assert not pool.fits(shared, 3)
    pool.hold(shared)
    assert pool.fits(shared, 2)


def test_the_first_of_equal_blocks_stays_the_one_that_is_found():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    pool.release([first, second])
    assert pool.find(b"same") == first
    assert (pool.num_cached, pool.num_free) == (1, 1)


def test_without_keep_unused_nothing_outlives_its_last_holder():
    pool = BlockPool(2, keep_unused=False)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.find(b"a") == blocks[0]
    pool.release(blocks)
    assert pool.find(b"a") is None
    assert pool.num_free == 2


def test_an_unpublished_block_is_free_when_released():
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.publish(blocks[0], b"a")
    pool.unpublish(blocks[0])
    pool.release(blocks)
    assert pool.find(b"a") is None
    assert pool.num_free == 1


@given(
    keep_unused=st.booleans(),
    operations=st.lists(st.tuples(st.sampled_from("trhp"), st.integers(0, 9)), max_size=60),
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_random_use_keeps_the_counts(keep_unused: bool, operations: list[tuple[str, int]]):
    pool = BlockPool(6, keep_unused=keep_unused)
    holdings: list[list[int]] = []
    for operation, number in operations:
        if operation == "t" and pool.num_available >= number % 4:
            holdings.append(pool.take(number % 4))
        elif operation == "r" and holdings:
            pool.release(holdings.pop(number % len(holdings)))
        elif operation == "h" and (block := pool.find(str(number).encode())) is not None:
            holdings.append([block])
            pool.hold([block])
        elif operation == "p":
            block = next((b for held in holdings for b in held), None)
            if block is not None:
                pool.unpublish(block)
                pool.publish(block, str(number).encode())
        pool.check_integrity(Counter(block for held in holdings for block in held))
