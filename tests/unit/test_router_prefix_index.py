"""What a router knows of a replica's prefix cache follows its events, and takes no more memory than it may."""

import pytest

from protos.scheduler_pb2 import CacheCleared, CacheEvent
from router.cache_view import CacheView
from runtime.block_names import block_names, scope_of

BLOCK_SIZE = 4
PROMPT = list(range(100, 118))
NAMES = block_names(PROMPT, BLOCK_SIZE, scope_of(""))
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
        # Nothing can be read behind a block that is missing.
        (stored(*NAMES[1:]), 0),
        ([*stored(*NAMES), *removed(NAMES[2])], 8),
        ([*stored(*NAMES), *removed(NAMES[2]), *stored(NAMES[2])], 16),
        ([*stored(*NAMES), CLEARED], 0),
        ([*stored(*NAMES), CLEARED, *stored(NAMES[0])], 4),
        # A Session that joins between an end and its news may hear of a block that it never knew.
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
    assert view.num_cached_tokens(block_names(PROMPT, BLOCK_SIZE, scope_of("tenant"))) == 0
    assert view.num_cached_tokens(block_names([1, *PROMPT], BLOCK_SIZE, scope_of(""))) == 0
    assert view.num_cached_tokens(block_names([*PROMPT[:8], 1, 2, 3, 4], BLOCK_SIZE, scope_of(""))) == 8


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
