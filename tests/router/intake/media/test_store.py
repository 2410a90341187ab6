"""The items of live requests: bytes are held once, shared fairly, and given back."""

import pytest

from protos import inference_pb2 as pb
from router.errors import RouterFull
from router.intake.media.store import ItemLease, ItemStore
from router.request.media.read import ReadItem
from router.security.identity import ANYONE, Identity
from runtime.media.packed import PackedItem
from runtime.media.recipes.recipe import Layout


def _item(size: int, fill: bytes = b"x") -> ReadItem:
    """An item of about so many bytes."""
    return ReadItem(
        PackedItem(pb.ITEM_KIND_IMAGE, [fill * size], 0.0, pb.ItemOptions()), Layout(token_ids=[1], num_embeddings=1)
    )


def test_an_item_is_held_once_until_its_last_holder_ends() -> None:
    store = ItemStore(1000)
    item, again = _item(300), _item(300)
    first, second = ItemLease(store, ANYONE), ItemLease(store, ANYONE)
    first.reserve(320)
    assert store.num_bytes == 320
    assert first.keep([item]) == [item]
    second.reserve(320)
    # The same file: what was here first is kept.
    assert second.keep([again])[0] is item
    assert (len(store), store.num_bytes) == (1, item.packed.num_bytes)
    first.close()
    first.close()
    assert store.find("", item.packed.name) is item
    second.close()
    assert (len(store), store.num_bytes) == (0, 0)


def test_twice_in_one_request() -> None:
    store = ItemStore(1000)
    with ItemLease(store, ANYONE) as held:
        held.reserve(640)
        held.keep([_item(300), _item(300)])
        assert len(store) == 1
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_does_not_fit_is_refused_and_reservations_are_given_back() -> None:
    store = ItemStore(1000)
    with ItemLease(store, ANYONE) as held:
        held.reserve(900)
        with pytest.raises(RouterFull, match="item_memory=1000 bytes"):
            held.reserve(101)
    assert store.num_bytes == 0
    # Without tenants one caller may take everything.
    ItemLease(store, ANYONE).reserve(1000)


def test_tenants_share_the_room_and_see_only_their_own_items() -> None:
    store = ItemStore(1000)
    one, other = (Identity(tenant=name) for name in ("one", "other"))
    item = _item(300)
    with ItemLease(store, one) as held:
        held.reserve(300)
        held.keep([item])
        with pytest.raises(RouterFull):
            # As much as stays free at most: half of all.
            held.reserve(400)
        with ItemLease(store, other) as others:
            assert others.find(item.packed.name) is None
            others.reserve(340)
        with ItemLease(store, one) as second:
            assert second.find(item.packed.name) is item
    assert (len(store), store.num_bytes) == (0, 0)
