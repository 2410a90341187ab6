"""A transcript: what a stream has sent is kept for the next reader, within its bound, and one reader has it."""

import asyncio
from collections.abc import Sequence

import pytest

from router.errors import Draining, NotKept, RequestError, Superseded
from router.intake.attach.transcript import Transcript


class _Source:
    """Gives what is put in, piece by piece; an error or nothing at the end."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[list[str] | RequestError] = asyncio.Queue()

    def put(self, *items: str) -> None:
        self._pieces.put_nowait(list(items))

    def fail(self, error: RequestError) -> None:
        self._pieces.put_nowait(error)

    async def take(self) -> list[str]:
        piece = await self._pieces.get()
        if isinstance(piece, RequestError):
            raise piece
        return piece


def _transcript(source: _Source, max_bytes: int = 1000, dropped: list[str] | None = None) -> Transcript[str]:
    return Transcript(source.take, len, max_bytes, [].append if dropped is None else dropped.append)


async def _all(transcript: Transcript[str], position: int, first: Sequence[str] = ()) -> list[str]:
    reader, items = transcript.read_from(position, first), []
    while taken := await reader.take():
        items += taken
    return items


async def test_a_later_reader_goes_on_where_the_first_one_stopped() -> None:
    source = _Source()
    transcript = _transcript(source)
    source.put("a", "b")
    source.put("c")
    reader = transcript.read_from(0)
    assert await reader.take() == ["a", "b"]
    assert transcript.leave(reader)
    source.put("d")
    source.put()
    assert await _all(transcript, 1, ["b again"]) == ["b again", "b", "c", "d"]
    assert transcript.is_over
    assert transcript.is_read
    assert await _all(transcript, 3) == ["d"]
    assert await _all(transcript, 4) == []


async def test_what_comes_while_a_reader_leaves_is_not_lost() -> None:
    """The reader's task is cancelled when its connection breaks, most often while it waits for the next event."""
    source = _Source()
    transcript = _transcript(source)
    reader = transcript.read_from(0)
    waiting = asyncio.create_task(reader.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    transcript.leave(reader)
    source.put("a")
    source.put()
    assert await _all(transcript, 0) == ["a"]


async def test_the_later_of_two_readers_has_the_stream() -> None:
    source = _Source()
    transcript = _transcript(source)
    first = transcript.read_from(0)
    waiting = asyncio.create_task(first.take())
    await asyncio.sleep(0)
    closed: list[bool] = []
    first.on_close(lambda: closed.append(True))
    second = transcript.read_from(0)
    with pytest.raises(Superseded):
        await waiting
    assert closed == [True]
    assert not transcript.leave(first), "it took the second reader's place away"
    source.put("a")
    assert await second.take() == ["a"]


async def test_only_the_latest_items_are_kept_and_those_taken_just_now_always() -> None:
    source, dropped = _Source(), list[str]()
    transcript = _transcript(source, max_bytes=4, dropped=dropped)
    reader = transcript.read_from(0)
    for items in (["aa", "bb"], ["cc"], ["dddddd"]):
        source.put(*items)
        assert await reader.take() == items
    assert dropped == ["aa", "bb", "cc"]
    assert (transcript.num_bytes, transcript.end) == (6, 4)
    transcript.check_position(3, "place")
    with pytest.raises(NotKept, match=r"place=2: .* only what follows 3 is"):
        transcript.check_position(2, "place")


async def test_the_error_that_ended_a_stream_is_told_to_every_reader() -> None:
    source = _Source()
    transcript = _transcript(source)
    source.put("a")
    source.fail(Draining("later"))
    for position in (0, 1):
        with pytest.raises(Draining):
            await _all(transcript, position)
    assert transcript.is_read


async def test_closing_gives_everything_back_and_ends_its_reader() -> None:
    source = _Source()
    transcript = _transcript(source)
    source.put("a")
    reader = transcript.read_from(0)
    await reader.take()
    waiting = asyncio.create_task(reader.take())
    await asyncio.sleep(0)
    await transcript.close()
    with pytest.raises(Superseded):
        await waiting
    assert (transcript.num_bytes, list(transcript.items())) == (0, [])


async def test_items_are_kept_packed_and_read_as_they_were() -> None:
    source, dropped = _Source(), list[str]()
    sizes: list[bytes] = []

    def size_of(packed: bytes) -> int:
        sizes.append(packed)
        return len(packed)

    transcript = Transcript[str](
        source.take, size_of, 6, dropped.append, pack=str.encode, unpack=lambda packed: packed.decode()
    )
    for item in ("öö", "b", "ccc", ""):
        source.put(*([item] if item else []))
    assert await _all(transcript, 0) == ["öö", "b", "ccc"]
    assert all(isinstance(each, bytes) for each in sizes)
    assert dropped == ["öö"]
    assert list(transcript.items()) == ["b", "ccc"]
    assert transcript.num_bytes == 4
