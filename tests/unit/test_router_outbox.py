"""What waits for a slow client: merged without loss, bounded, and ended with the right error."""

import asyncio

import pytest

from protos.inference_pb2 import Chunk, Finish, GenerateResponse, Started
from router.errors import Cancelled, SlowReader
from router.outbox import Outbox, OutboxFullError


def _chunk(index: int, first_token: int, text: str, **fields: object) -> Chunk:
    return Chunk(index=index, first_token=first_token, token_ids=[first_token], text=text, exact=True, **fields)  # type: ignore[arg-type]


async def test_waiting_chunks_of_a_choice_become_one() -> None:
    outbox = Outbox(10_000)
    outbox.put(GenerateResponse(started=Started()))
    for i in range(3):
        outbox.put_chunk(_chunk(0, i, f"a{i}"))
        outbox.put_chunk(_chunk(1, i, f"b{i}"))
    outbox.put_chunk(_chunk(0, 3, "a3", finish=Finish(reason=1)))  # type: ignore[arg-type]
    started, first, second = await outbox.take()
    assert started.HasField("started")
    assert (first.chunk.first_token, list(first.chunk.token_ids), first.chunk.text) == (0, [0, 1, 2, 3], "a0a1a2a3")
    assert first.chunk.HasField("finish")
    assert (list(second.chunk.token_ids), second.chunk.text) == ([0, 1, 2], "b0b1b2")
    outbox.put_chunk(_chunk(1, 3, "b3"))
    assert [event.chunk.first_token for event in await outbox.take()] == [3], "what was taken is not merged into"


async def test_exact_and_inexact_chunks_are_not_merged() -> None:
    outbox = Outbox(10_000)
    outbox.put_chunk(_chunk(0, 0, "a"))
    inexact = _chunk(0, 1, "b")
    inexact.exact = False
    outbox.put_chunk(inexact)
    assert [event.chunk.exact for event in await outbox.take()] == [True, False]


async def test_the_bound_holds_and_reading_makes_room() -> None:
    outbox = Outbox(1000)
    outbox.put_chunk(_chunk(0, 0, "x" * 900))
    with pytest.raises(OutboxFullError):
        outbox.put_chunk(_chunk(0, 1, "x" * 900))
    outbox = Outbox(1000)
    outbox.put_chunk(_chunk(0, 0, "x" * 5000))
    await outbox.take()
    for i in range(100):
        outbox.put_chunk(_chunk(0, i, "x" * 20))
        await outbox.take()


async def test_an_error_comes_after_what_waits_or_at_once() -> None:
    outbox = Outbox(1000)
    outbox.put_chunk(_chunk(0, 0, "a"))
    outbox.close(Cancelled("gone"))
    assert len(await outbox.take()) == 1
    with pytest.raises(Cancelled):
        await outbox.take()
    outbox = Outbox(1000)
    outbox.put_chunk(_chunk(0, 0, "a"))
    outbox.close(SlowReader("slow"), discard=True)
    with pytest.raises(SlowReader):
        await outbox.take()


async def test_a_reader_that_waits_is_woken_by_events_and_by_the_end() -> None:
    outbox = Outbox(1000)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put_chunk(_chunk(0, 0, "a"))
    assert len(await reader) == 1
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await reader == []
