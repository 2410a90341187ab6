"""A router's view of its replicas' prefix caches follows their events, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.scheduler_pb2 import CacheCleared, CacheEvent
from router.replicas.policies.prefix_index import PrefixIndex
from runtime.block_hashes import hash_prompt_blocks, scope_of
from tests.support.scheduler.cache_view import CacheView

BLOCK_SIZE = 4
PROMPT = list(range(100, 118))
NAMES = hash_prompt_blocks(PROMPT, BLOCK_SIZE, scope_of(""))
CLEARED = CacheEvent(cleared=CacheCleared())


def stored(*names: bytes) -> list[CacheEvent]:
    return [CacheEvent(stored=name) for name in names]


def removed(*names: bytes) -> list[CacheEvent]:
    return [CacheEvent(removed=name) for name in names]


@pytest.mark.parametrize(
    ("events", "num_tokens"),
    [
        ([], 0),
        ([CLEARED, *stored(*NAMES)], 16),
        (stored(*NAMES[:2]), 8),
        # Blocks behind a missing block can't be used.
        (stored(*NAMES[1:]), 0),
        ([*stored(*NAMES), *removed(NAMES[2])], 8),
        ([*stored(*NAMES), *removed(NAMES[2]), *stored(NAMES[2])], 16),
        ([*stored(*NAMES), CLEARED], 0),
        ([*stored(*NAMES), CLEARED, *stored(NAMES[0])], 4),
        # A Session that joins between a removal and its event may get the event for a block that it never knew.
        (removed(NAMES[0]), 0),
    ],
)
def test_the_leading_blocks_known_count(events: list[CacheEvent], num_tokens: int) -> None:
    view = CacheView(BLOCK_SIZE, max_blocks=8)
    view.apply(events)
    assert view.num_cached_tokens(NAMES) == num_tokens


def test_other_salts_and_other_prefixes_find_nothing() -> None:
    view = CacheView(BLOCK_SIZE, max_blocks=8)
    view.apply(stored(*NAMES))
    assert view.num_cached_tokens(hash_prompt_blocks(PROMPT, BLOCK_SIZE, scope_of("tenant"))) == 0
    assert view.num_cached_tokens(hash_prompt_blocks([1, *PROMPT], BLOCK_SIZE, scope_of(""))) == 0
    assert view.num_cached_tokens(hash_prompt_blocks([*PROMPT[:8], 1, 2, 3, 4], BLOCK_SIZE, scope_of(""))) == 8


def test_a_replica_cannot_fill_the_routers_memory() -> None:
    view = CacheView(BLOCK_SIZE, max_blocks=3)
    view.apply(stored(*NAMES[:3], *NAMES[:3]))
    assert len(view) == 3
    with pytest.raises(ValueError, match="more than the 3 blocks"):
        view.apply(stored(NAMES[3]))
    with pytest.raises(ValueError, match="5 bytes"):
        view.apply(stored(b"short"))
    with pytest.raises(ValueError, match="none of the kinds"):
        view.apply([CacheEvent()])


# --- Several replicas


def _index(*replicas: int, max_blocks: int = 8) -> PrefixIndex:
    index = PrefixIndex()
    for replica in replicas:
        index.add(replica, block_size=BLOCK_SIZE, max_blocks=max_blocks)
    return index


def test_each_replica_has_its_own_leading_blocks() -> None:
    index = _index(0, 1, 70)
    index.apply(0, stored(*NAMES[:1]))
    index.apply(1, stored(*NAMES[1:]))
    index.apply(70, stored(*NAMES))
    assert index.num_cached_blocks(NAMES) == {0: 1, 70: 4}
    assert index.num_cached_blocks([]) == {}


def test_what_was_sent_counts_until_it_is_known_better() -> None:
    index = _index(0, 1)
    index.expect(0, NAMES)
    assert index.num_cached_blocks(NAMES) == {0: 4}
    index.apply(0, [*stored(*NAMES), *removed(NAMES[3])])
    assert index.num_cached_blocks(NAMES) == {0: 3}
    index.expect(1, NAMES)
    index.apply(1, [CLEARED])
    assert index.num_cached_blocks(NAMES) == {0: 3}


def test_expectations_that_never_come_true_make_way() -> None:
    index = _index(0, max_blocks=2)
    others = hash_prompt_blocks(range(50, 58), BLOCK_SIZE, scope_of(""))
    index.expect(0, NAMES[:2])
    index.expect(0, others)
    assert index.num_cached_blocks(NAMES) == {}
    assert index.num_cached_blocks(others) == {0: 2}


def test_a_replica_whose_workers_begin_anew_may_have_more_blocks() -> None:
    index = _index(0, max_blocks=2)
    index.resize(0, 4)
    index.apply(0, stored(*NAMES))
    assert index.num_cached_blocks(NAMES) == {0: 4}
    index.resize(0, 3)
    with pytest.raises(ValueError, match="more than the 3 blocks"):
        index.apply(0, stored(NAMES[0]))


def test_a_replica_that_goes_takes_what_is_known_of_it_along() -> None:
    index = _index(0, 1)
    for replica in (0, 1):
        index.apply(replica, stored(*NAMES))
    index.remove(0)
    assert index.num_cached_blocks(NAMES) == {1: 4}
    index.add(0, block_size=BLOCK_SIZE, max_blocks=8)
    assert index.num_cached_blocks(NAMES) == {1: 4}


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["stored", "removed", "cleared", "expect"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_it_says_what_lists_of_names_would(steps: list[tuple[int, str, int]]) -> None:
    """Replicas have room for all blocks, so that no expectation is dropped."""
    index, held = _index(0, 1, 2), {replica: set[bytes]() for replica in range(3)}
    for replica, kind, number in steps:
        name = NAMES[number]
        if kind == "expect":
            index.expect(replica, [name])
            held[replica].add(name)
        elif kind == "cleared":
            index.apply(replica, [CLEARED])
            held[replica].clear()
        else:
            index.apply(replica, stored(name) if kind == "stored" else removed(name))
            (held[replica].add if kind == "stored" else held[replica].discard)(name)
        leading = {each: next((i for i, n in enumerate(NAMES) if n not in held[each]), len(NAMES)) for each in held}
        assert index.num_cached_blocks(NAMES) == {each: count for each, count in leading.items() if count}
