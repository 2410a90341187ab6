"""Messages that wait for a router: joined, in order, never above the bounds."""

import asyncio
from collections.abc import Sequence

import numpy as np

from protos import scheduler_pb2 as wire
from runtime.wire import SESSION_MESSAGE_BYTES
from scheduler.core.messages import BlockRemoved, BlockStored, FinishReason
from scheduler.sessions.outgoing import SESSION_BUFFER_BYTES, Outgoing, Parcel
from scheduler.sessions.sessions import Outbox, OutputColumns


def _step(number: int, groups: Sequence[int], load: wire.Load | None = None) -> list[Parcel]:
    """A step in which each group got a token: 1000 times the step, plus the group."""
    outbox = Outbox()
    _add(outbox, number, groups)
    return outbox.take(load)


def _add(outbox: Outbox, step: int, groups: Sequence[int]) -> None:
    size = len(groups)
    outbox.add_columns(
        OutputColumns(
            groups=np.array(groups, np.int64),
            choices=np.zeros(size, np.int32),
            first_tokens=np.full(size, step, np.int32),
            num_tokens=None,
            token_ids=np.array(groups, np.int32) % 1000 + 1000 * step,
        )
    )


async def _all(outgoing: Outgoing) -> list[wire.SchedulerMessage]:
    """Everything up to the end."""
    outgoing.close()
    found = []
    while (text := await outgoing.get()) is not None:
        assert len(text) <= SESSION_MESSAGE_BYTES
        found.append(wire.SchedulerMessage.FromString(text))
    return found


def _entries(message: wire.SchedulerMessage) -> list[tuple[int, int, int, int]]:
    outputs = message.outputs
    assert set(outputs.num_tokens) <= {1}
    return list(zip(outputs.groups, outputs.first_tokens, outputs.choices, outputs.token_ids, strict=True))


async def test_steps_that_wait_are_one_message_with_the_last_load() -> None:
    """A load's zeros are not on the wire: merged with an earlier one, its counts would never go down again."""
    outgoing = Outgoing(SESSION_BUFFER_BYTES)
    busy = wire.Load(num_running=2, num_waiting=5, last_step=1)
    busy.refused_tenants["one"] = 3
    outgoing.put(_step(1, [7, 8], busy))
    outgoing.put(_step(2, [7, 8]))
    outbox = Outbox()
    _add(outbox, 3, [8])
    outbox.add_finish(7, 0, FinishReason.LENGTH, num_cached_tokens=4)
    calm = wire.Load(num_running=1, last_step=3)
    outgoing.put(outbox.take(calm))
    outgoing.put(_step(4, [8]))
    [message] = await _all(outgoing)
    assert _entries(message) == [
        (7, 1, 0, 1007),
        (8, 1, 0, 1008),
        (7, 2, 0, 2007),
        (8, 2, 0, 2008),
        (8, 3, 0, 3008),
        (8, 4, 0, 4008),
    ]
    assert [(finish.group, finish.num_cached_tokens) for finish in message.outputs.finishes] == [(7, 4)]
    assert message.load == calm


async def test_all_that_a_message_can_have_is_joined_in_order() -> None:
    outgoing = Outgoing(SESSION_BUFFER_BYTES)
    for step in (1, 2):
        outbox = Outbox()
        _add(outbox, step, [7])
        outbox.add_rejected(step, wire.REJECT_REASON_QUEUE_FULL, f"the queue is full {step}")
        outbox.add_cache_events([BlockRemoved(bytes([step] * 32)), BlockStored(bytes([step + 1] * 32))])
        outbox.add_wanted_item(bytes([step] * 32))
        outgoing.put(outbox.take())
    [message] = await _all(outgoing)
    assert [each.message for each in message.rejected] == ["the queue is full 1", "the queue is full 2"]
    assert [each.stored or each.removed for each in message.cache_events] == [bytes([i] * 32) for i in (1, 2, 2, 3)]
    assert list(message.wanted_items) == [bytes([i] * 32) for i in (1, 2)]
    assert not message.HasField("load")


async def test_a_welcome_begins_a_message() -> None:
    """A router takes in a message's Welcome first: tokens of the epoch before must not come with it."""
    outgoing = Outgoing(SESSION_BUFFER_BYTES)
    outgoing.put(_step(1, [7]))
    outgoing.put(Outbox().take(wire.Load(num_running=1), wire.Welcome(epoch=2)))
    outgoing.put(_step(2, [7], wire.Load(num_running=3)))
    first, second = await _all(outgoing)
    assert [_entries(each) for each in (first, second)] == [[(7, 1, 0, 1007)], [(7, 2, 0, 2007)]]
    assert [each.HasField("welcome") for each in (first, second)] == [False, True]
    assert (second.welcome.epoch, second.load.num_running) == (2, 3)


async def test_a_joined_message_is_no_larger_than_any_other() -> None:
    """10,000 streams: a message has as many steps as 1 MiB holds, and no step is lost or cut."""
    outgoing = Outgoing(SESSION_BUFFER_BYTES)
    groups = list(range(200_000, 210_000))
    load = wire.Load(num_running=10_000)
    load.refused_tenants.update({f"tenant {number}": number for number in range(100)})
    for step in range(40):
        outgoing.put(_step(step, groups, load))
    messages = await _all(outgoing)
    steps = [len(message.outputs.groups) / len(groups) for message in messages]
    assert sum(steps) == 40
    assert steps[0] >= 8
    assert [entry[:2] for message in messages for entry in _entries(message)] == [
        (group, step) for step in range(40) for group in groups
    ]


async def test_what_waits_is_bounded_and_what_was_sent_does_not_count() -> None:
    outgoing = Outgoing(1000)
    parcel = Parcel(body=bytes(300), load=bytes(100))
    for _ in range(3):
        outgoing.put([parcel, parcel])
        assert await outgoing.get() == bytes(300 + 300 + 100)
    outgoing.put([parcel, parcel])
    assert not outgoing.is_overfull
    outgoing.put([parcel])
    assert outgoing.is_overfull
    assert await outgoing.get() is None


async def test_a_reader_waits_for_what_comes_next() -> None:
    outgoing = Outgoing(1000)
    reader = asyncio.ensure_future(outgoing.get())
    await asyncio.sleep(0)
    assert not reader.done()
    outgoing.put([Parcel(body=b"one")])
    assert await reader == b"one"
    reader = asyncio.ensure_future(outgoing.get())
    await asyncio.sleep(0)
    outgoing.close()
    assert await reader is None
