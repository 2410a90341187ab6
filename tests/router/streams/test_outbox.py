"""Output that waits for a slow client: merged without loss, bounded, and ended with the right error."""

import asyncio
from itertools import pairwise

import pytest

from protos.inference_pb2 import Finish, GenerateResponse, Started, TokenLogprob, TokenLogprobs
from router.errors import Cancelled, SlowReader
from router.streams.choices import Delta
from router.streams.outbox import TAKEN_BYTES, Outbox, OutboxFullError, WriteQueue


def _outbox(max_bytes: int) -> Outbox:
    return Outbox(max_bytes, WriteQueue())


def _delta(index: int, first_token: int, text: str, finish: Finish | None = None) -> Delta:
    return Delta(index, first_token, [first_token], text, (), finish)


async def test_waiting_deltas_of_a_choice_become_one() -> None:
    outbox = _outbox(10_000)
    outbox.put(GenerateResponse(started=Started()))
    for i in range(3):
        outbox.put_delta(_delta(0, i, f"a{i}"))
        outbox.put_delta(_delta(1, i, f"b{i}"))
    outbox.put_delta(_delta(0, 3, "a3", finish=Finish(reason=1)))  # type: ignore[arg-type]
    started, first, second = await outbox.take()
    assert started.HasField("started")
    assert (first.chunk.first_token, list(first.chunk.token_ids), first.chunk.text) == (0, [0, 1, 2, 3], "a0a1a2a3")
    assert first.chunk.HasField("finish")
    assert (list(second.chunk.token_ids), second.chunk.text) == ([0, 1, 2], "b0b1b2")
    outbox.put_delta(_delta(1, 3, "b3"))
    assert [event.chunk.first_token for event in await outbox.take()] == [3], "merged into a taken delta"


async def test_what_is_kept_for_a_reader_to_come_is_packed_and_reads_the_same() -> None:
    plain, kept = _outbox(100_000), _outbox(200_000)
    # A delta that came before counts, too.
    for position in range(6):
        if position == 2:
            kept.keep()
        chosen = TokenLogprob(token_id=position, logprob=-0.5, rank=1, token=b"x")
        scored = [TokenLogprobs(chosen=chosen, top=[chosen] * 3)]
        for outbox in (plain, kept):
            delta = Delta(0, position, [position], "x", scored, None)
            outbox.put_delta(delta)
            assert bool(delta.packed and not delta.logprobs) == (outbox is kept and position >= 2)
    [whole], [unpacked] = await plain.take(), await kept.take()
    assert len(whole.chunk.logprobs) == 6
    assert unpacked == whole


async def test_it_is_delivered_once_all_has_been_taken_and_no_error_ended_it() -> None:
    """A client that leaves after the last message has not cancelled."""
    well, badly = _outbox(10_000), _outbox(10_000)
    for outbox in (well, badly):
        outbox.put_delta(_delta(0, 0, "a"))
        assert not outbox.is_delivered
    well.close()
    badly.close(Cancelled("gone"))
    assert not well.is_delivered
    for outbox in (well, badly):
        await outbox.take()
    assert (well.is_delivered, badly.is_delivered) == (True, False)


async def test_exact_and_inexact_deltas_are_not_joined() -> None:
    outbox = _outbox(10_000)
    outbox.put_delta(_delta(0, 0, "a"))
    inexact = _delta(0, 1, "b")
    inexact.exact = False
    outbox.put_delta(inexact)
    assert [event.chunk.exact for event in await outbox.take()] == [True, False]


async def test_the_bound_holds_and_reading_makes_room() -> None:
    outbox = _outbox(1000)
    outbox.put_delta(_delta(0, 0, "x" * 900))
    with pytest.raises(OutboxFullError):
        outbox.put_delta(_delta(0, 1, "x" * 900))
    outbox = _outbox(1000)
    outbox.put_delta(_delta(0, 0, "x" * 5000))
    await outbox.take()
    for i in range(100):
        outbox.put_delta(_delta(0, i, "x" * 20))
        await outbox.take()


async def test_an_error_comes_after_what_waits_or_at_once() -> None:
    outbox = _outbox(1000)
    outbox.put_delta(_delta(0, 0, "a"))
    outbox.close(Cancelled("gone"))
    assert len(await outbox.take()) == 1
    with pytest.raises(Cancelled):
        await outbox.take()
    outbox = _outbox(1000)
    outbox.put_delta(_delta(0, 0, "a"))
    outbox.close(SlowReader("slow"), discard=True)
    with pytest.raises(SlowReader):
        await outbox.take()


async def test_what_is_discarded_does_not_come() -> None:
    outbox = _outbox(1000)
    outbox.put_delta(_delta(0, 0, "a"))
    outbox.discard()
    outbox.put_delta(_delta(0, 1, "b"))
    [event] = await outbox.take()
    assert event.chunk.text == "b"


async def test_a_reader_that_waits_is_woken_by_events_and_by_the_end() -> None:
    outbox = _outbox(1000)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put_delta(_delta(0, 0, "a"))
    assert len(await reader) == 1
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await reader == []


async def test_streams_that_wait_their_turn_gather_tokens_and_none_is_passed_over() -> None:
    """A router that can't write to all streams before the next step keeps reading, and sends fewer, larger messages."""
    queue = WriteQueue()
    outboxes = [Outbox(10_000, queue) for _ in range(100)]
    taken: list[tuple[int, int]] = []

    async def write(number: int) -> None:
        [event] = await outboxes[number].take()
        taken.append((number, len(event.chunk.token_ids)))

    writers = [asyncio.create_task(write(number)) for number in range(len(outboxes))]
    await asyncio.sleep(0)
    for step in range(2):
        for outbox in outboxes:
            outbox.put_delta(_delta(0, step, "a"))
        # The reader's next message comes one or two turns of the loop later.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*writers)
    assert [number for number, _ in taken] == list(range(len(outboxes))), "not in the order in which they asked"
    sizes = [size for _, size in taken]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1, "the first stream must not wait"
    assert sizes[-1] == 2, "the last streams must have their turn after the second step"


async def test_a_writer_that_has_gone_costs_no_turn() -> None:
    queue = WriteQueue()
    gone, here = Outbox(1000, queue), Outbox(1000, queue)
    reader = asyncio.create_task(gone.take())
    await asyncio.sleep(0)
    gone.put_delta(_delta(0, 0, "a"))
    reader.cancel()
    here.put_delta(_delta(0, 0, "b"))
    assert [event.chunk.text for event in await here.take()] == ["b"]
    gone.put_delta(_delta(0, 1, "c"))
    assert [event.chunk.text for event in await gone.take()] == ["ac"], "unread text must wait for the next reader"


async def test_a_reader_takes_little_at_once_and_others_run_in_between() -> None:
    """A reader that lagged used to get all that waited, which held the event loop for as long as it took to encode."""
    outbox = _outbox(2**22)
    for position in range(100):
        outbox.put_delta(_delta(0, position, "x" * 4000))
    order: list[int | str] = []

    async def tick() -> None:
        while not outbox.closed or outbox._waiting:
            order.append("other")
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    text = ""
    outbox.close()
    while events := await outbox.take():
        size = sum(len(event.chunk.text) for event in events)
        assert size <= TAKEN_BYTES + 4000
        text += "".join(event.chunk.text for event in events)
        order.append(size)
    await ticking
    takes = [i for i, what in enumerate(order) if what != "other"]
    assert len(takes) == 6
    assert text == "x" * 400_000
    assert all("other" in order[first:second] for first, second in pairwise(takes))


async def test_what_is_left_of_a_take_counts_and_may_grow() -> None:
    outbox = _outbox(100_000)
    for position in range(20):
        outbox.put_delta(_delta(position, 0, "x" * 4000))
    assert len(await outbox.take()) == 17
    outbox.put_delta(_delta(19, 1, "y"))
    with pytest.raises(OutboxFullError):
        outbox.put_delta(_delta(0, 1, "x" * 90_000))
    *_, last = await outbox.take()
    assert (last.chunk.index, last.chunk.text[-2:]) == (19, "xy")


async def test_one_who_collects_an_answer_is_no_slow_client() -> None:
    outbox = _outbox(1000)
    outbox.collect()
    for position in range(3):
        outbox.put_delta(_delta(0, position, "x" * 900))
    assert sum(len(event.chunk.text) for event in await outbox.take()) == 2700
