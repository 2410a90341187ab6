"""Items in parts, and the store that keeps them while groups need them."""

import pytest

from protos import inference_pb2, scheduler_pb2
from runtime.media.names import item_name
from scheduler.sessions.commands import RefuseItem, StoreItem
from scheduler.sessions.items import MOST_ITEM_BYTES, IncomingItems, ItemMemory, ItemStore, ProtocolError
from scheduler.sessions.submissions import Intake


def parts_of(data: bytes, *, size: int = 10, name: bytes | None = None) -> list[scheduler_pb2.ItemPart]:
    name = item_name(data) if name is None else name
    starts = range(0, len(data), size)
    return [scheduler_pb2.ItemPart(name=name, num_bytes=len(data), data=data[i : i + size]) for i in starts]


def test_parts_of_several_items_may_be_mixed():
    memory = ItemMemory(1000)
    incoming = IncomingItems(memory)
    one, two = bytes(range(35)), bytes(range(100, 125))
    got = []
    for pair in zip(parts_of(one), [*parts_of(two), None], strict=True):
        for part in filter(None, pair):
            got += incoming.add(part)
    assert got == [StoreItem(name=item_name(two), data=two), StoreItem(name=item_name(one), data=one)]
    assert memory.num_incoming == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": b"short"}, "item_part.name has 5 bytes"),
        ({"num_bytes": 0}, "item_part.num_bytes is 0"),
        ({"num_bytes": 3}, "make 10 of 3"),
        ({"data": b""}, "item_part.data: 0 bytes"),
    ],
)
def test_parts_that_contradict_themselves_end_the_session(changes: dict[str, object], words: str):
    part = parts_of(bytes(20))[0]
    for field, value in changes.items():
        setattr(part, field, value)
    with pytest.raises(ProtocolError, match=words):
        IncomingItems(ItemMemory(1000)).add(part)


def test_parts_that_contradict_each_other_end_the_session():
    incoming, (first, second) = IncomingItems(ItemMemory(1000)), parts_of(bytes(20))
    incoming.add(first)
    second.num_bytes = 21
    with pytest.raises(ProtocolError, match="21 after 20 for the same item"):
        incoming.add(second)


def test_data_under_a_wrong_name_ends_the_session():
    (part,) = parts_of(b"data", name=bytes(32))
    with pytest.raises(ProtocolError, match="another name"):
        IncomingItems(ItemMemory(1000)).add(part)


def test_an_item_that_no_message_or_memory_has_room_for_is_refused_and_its_parts_are_dropped():
    memory = ItemMemory(2 * MOST_ITEM_BYTES)
    incoming = IncomingItems(memory)
    large = scheduler_pb2.ItemPart(name=bytes(32), num_bytes=MOST_ITEM_BYTES + 1, data=b"1")
    (refused,) = incoming.add(large)
    assert isinstance(refused, RefuseItem)
    assert refused.reason == scheduler_pb2.REJECT_REASON_INVALID
    assert not incoming.add(large), "said once"
    assert memory.num_incoming == 0
    small = IncomingItems(ItemMemory(30))
    (refused,) = small.add(parts_of(bytes(31))[0])
    assert isinstance(refused, RefuseItem)
    assert "item_memory" in refused.message


def test_incoming_and_needed_items_together_stay_within_the_memory():
    memory = ItemMemory(100)
    store, incoming = ItemStore(memory), IncomingItems(memory)
    needed = bytes(60)
    store.pin(1, [item_name(needed)])
    store.put(item_name(needed), needed)
    (refused,) = incoming.add(parts_of(bytes(41))[0])
    assert isinstance(refused, RefuseItem)
    assert refused.reason == scheduler_pb2.REJECT_REASON_QUEUE_FULL
    assert not incoming.add(parts_of(bytes(40))[0])
    assert memory.num_incoming == 40
    # Another Session finds no room while this one is not complete.
    (refused,) = IncomingItems(memory).add(parts_of(b"1")[0])
    assert isinstance(refused, RefuseItem)
    incoming.close()
    assert memory.num_incoming == 0
    store.unpin(1)
    assert memory.num_pinned == 0
    assert not incoming.add(parts_of(bytes(100))[0]), "what is not needed makes way"


def test_what_groups_need_stays_and_the_least_recently_used_goes_first():
    store = ItemStore(ItemMemory(100))
    a, b, c, d = (bytes([i]) * 40 for i in range(4))
    names = {data: item_name(data) for data in (a, b, c, d)}
    assert store.pin(1, [names[a]]) == [names[a]]
    store.put(names[a], a)
    store.put(names[b], b)
    store.check_integrity()
    store.put(names[c], c)
    assert set(store) == {names[a], names[c]}
    assert store.pin(2, [names[a], names[c]]) == []
    store.unpin(1)
    store.check_integrity()
    store.unpin(2)
    store.put(names[d], d)
    assert len(set(store)) == 2
    assert store.get(names[d]) == d
    store.check_integrity()


def test_groups_that_wait_for_a_refused_item_are_named_and_later_ones_too():
    store, name = ItemStore(ItemMemory(100)), item_name(b"x")
    store.pin(7, [name])
    store.pin(3, [name])
    store.unpin(7)
    assert store.refuse(name, scheduler_pb2.REJECT_REASON_QUEUE_FULL, "full") == [3]
    assert store.refusal([name]) == (scheduler_pb2.REJECT_REASON_QUEUE_FULL, "full")
    store.put(name, b"x")
    assert store.refusal([name]) is None
    assert store.refuse(name, scheduler_pb2.REJECT_REASON_QUEUE_FULL, "full") == [], "it is here"
    store.check_integrity()


_SPAN = {"name": bytes(32), "kind": 1, "first_token": 2, "num_tokens": 4, "num_embeddings": 4, "grid": [1, 2, 2]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"name": b"abc"}, "items[1].name has 3 bytes"),
        ({"kind": 0}, "items[1].kind is 0"),
        ({"num_embeddings": 5}, "items[1].num_embeddings=5: give 1 to num_tokens"),
        ({"num_embeddings": 0}, "items[1].num_embeddings=0"),
        ({"first_token": 1}, "items[1].first_token=1: the item before it ends at 2"),
        ({"first_token": 7}, "items[1] ends at token 11, but the prompt has 10"),
        ({"grid": [2, 2]}, "items[1].grid is [2, 2]"),
        ({"grid": [2, 2, 2]}, "whose product is at most num_tokens"),
        ({"time_step": float("inf")}, "items[1].time_step=inf"),
    ],
)
def test_spans_that_make_no_sense_are_refused(changes: dict[str, object], words: str):
    model = inference_pb2.ModelInfo(max_model_len=100, vocab_size=100)
    intake = Intake(1, model, max_unsent_tokens=100, item_memory=ItemMemory(100))
    video = inference_pb2.ITEM_KIND_VIDEO
    first = inference_pb2.ItemSpan(name=bytes(32), kind=video, first_token=0, num_tokens=2, num_embeddings=1)
    submit = scheduler_pb2.Submit(
        group=1,
        request_id="r",
        num_prompt_tokens=10,
        prompt_token_ids=range(10),
        choices=[scheduler_pb2.SequenceStart()],
        sampling=inference_pb2.SamplingParams(max_tokens=1),
        items=[first, inference_pb2.ItemSpan(**(_SPAN | changes))],  # type: ignore[arg-type]
    )
    (command,) = intake.receive(scheduler_pb2.RouterMessage(submit=submit), 0.0)
    assert words in getattr(command, "message", "")
    assert bool(words) == hasattr(command, "message")
