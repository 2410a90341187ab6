"""How answers reach a client that may leave, read nothing, or come again to read the rest."""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from protos import inference_pb2 as pb
from protos.peers_pb2 import StreamEvent
from router.api.encoded import PART_BYTES, Body, EncodedList, parts_of
from router.api.gateway.errors import BadRequestError, body_of
from router.api.gateway.events import Event
from router.api.gateway.openai.reply import Reply
from router.errors import InvalidRequest, RequestError
from router.intake.attach.attachments import Attachments
from router.intake.attach.held_streams import HeldStream
from router.intake.attach.transcript import Transcript
from router.request.checks import check_request_id
from router.security.identity import caller
from router.streams import outbox
from router.streams.whole_answers import AnswerRoom
from router.text.tokenizer import Tokenizer
from router.turns import finish_in_slices

log = logging.getLogger("octavo.router.gateway")

_LAST_EVENT = "last-event-id"
# What an event that is kept takes beside its text.
_EVENT_BYTES = 256

# Tokens that are shown in one step: 1 ms.
_TOKENS = 4096

Piece = dict[str, str]


class LongPiece(dict[str, str]):
    """An event with much data, a tree that is encoded while it is sent."""

    def __init__(self, event: str, tree: dict[str, Any]) -> None:
        super().__init__(event=event)
        self._tree = tree

    def parts(self) -> Iterator[bytes]:
        """Yields the event as it is sent. JSON has no line breaks."""
        small = bytearray(f"event: {self['event']}\ndata: ".encode())
        for part in parts_of(self._tree):
            small += part
            if len(small) >= PART_BYTES:
                yield bytes(small)
                small.clear()
        yield bytes(small) + b"\n\n"


class Source(Protocol):
    """The pieces that become a stream's chunks."""

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class EventStream(EventSourceResponse):
    """Closes its source when the client's connection ends, even before the first chunk, or when the client has read
    nothing for UNREAD_S."""

    def __init__(self, chunks: AsyncGenerator[Piece, None], source: Source, *, has_long: bool = False) -> None:
        """has_long: there may be a LongPiece among them."""
        # Clients that split events by hand know only LF.
        own = self._in_parts(chunks) if has_long else chunks
        super().__init__(own, send_timeout=outbox.UNREAD_S, sep="\n")
        self._source = source

    async def _in_parts(self, chunks: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece | bytes, None]:
        async with aclosing(chunks):
            async for piece in chunks:
                if not isinstance(piece, LongPiece):
                    yield piece
                    continue
                # Pings wait for it: a line of theirs would end the event.
                async with self._send_lock:
                    for part in piece.parts():
                        yield part
                        await asyncio.sleep(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            log.info("a client has read nothing for %g s: its stream ends", outbox.UNREAD_S)
        finally:
            await self._source.aclose()


class WholeAnswer(Response):
    """Sends a body in parts, as its client reads them; each gives its room back. A client that has read nothing for
    UNREAD_S gets no more."""

    media_type = "application/json"

    def __init__(self, body: Body) -> None:
        super().__init__(headers={"content-length": str(body.size)})
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts, room = self._body.parts, self._body.room
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while parts:
                part = parts.popleft()
                async with asyncio.timeout(outbox.UNREAD_S):
                    await send({"type": "http.response.body", "body": part, "more_body": bool(parts)})
                room.shrink(len(part))
                # Writing to a client that reads as fast gives nobody else a turn.
                await asyncio.sleep(0)
        except TimeoutError:
            log.info("a client has read nothing for %g s: its answer ends", outbox.UNREAD_S)
        finally:
            parts.clear()
            room.close()


async def sent_whole(tree: Any, room: AnswerRoom, steps: Iterable[None] = ()) -> Response:
    """Encodes an answer (router.api.encoded), and hands its room over with it. steps: fill the tree before.

    Raises RequestError, with the room closed."""
    with contextlib.ExitStack() as held:
        held.callback(room.close)
        body = Body(room)
        await finish_in_slices(iter(steps))
        await finish_in_slices(body.fill(tree))
        if len(body.parts) == 1:
            return Response(body.parts[0], media_type="application/json")
        held.pop_all()
        return WholeAnswer(body)


async def sent_tokens(
    shown: dict[str, Any], token_ids: Sequence[int], table: Tokenizer | None, room: AnswerRoom
) -> Response:
    """Answers with a list of tokens, behind what else is shown. table: for their texts; None: without."""
    tokens, texts = EncodedList(room.grow), EncodedList(room.grow)

    def fill() -> Iterator[None]:
        for start in range(0, len(token_ids), _TOKENS):
            some = list(token_ids[start : start + _TOKENS])
            tokens.extend(some)
            if table is not None:
                texts.extend([table.token_bytes(token_id).decode(errors="replace") for token_id in some])
            yield

    of_tokens = {"tokens": tokens} | ({} if table is None else {"token_strs": texts})
    return await sent_whole({**shown, **of_tokens}, room, fill())


async def collected(
    events: AsyncGenerator[Event, None],
    reply: Reply,
    room: AnswerRoom,
    keep: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Answers with what the events add up to. room: what `reply` grows in. keep: called once all have come.

    Raises RequestError."""
    try:
        async with aclosing(events):
            async for event in events:
                reply.take(*event)
        if keep is not None:
            await keep()
        return await sent_whole(reply.whole(), room)
    except BaseException:
        room.close()
        raise


async def answered(request: Request, collect: Coroutine[Any, Any, Response]) -> Response:
    """Answers with what `collect` returns. A client that goes away cancels it."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, gone = asyncio.create_task(collect), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads this answer: the client has gone.
        return collecting.result() if collecting.done() else Response(status_code=HTTPStatus.NO_CONTENT)
    finally:
        for task in (collecting, gone):
            task.cancel()
        await asyncio.gather(collecting, gone, return_exceptions=True)


def request_id_of(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex


class HeldEvents:
    def __init__(self, attachments: Attachments) -> None:
        self._attachments, self._held = attachments, attachments.held
        self.routes = [
            Route("/v1/streams/{request_id}", self._go_on, methods=["GET"]),
            Route("/v1/streams/{request_id}", self._end, methods=["DELETE"]),
        ]

    def seconds_of(self, messages: Sequence[pb.GenerateRequest], *, is_stream: bool) -> float:
        """Returns for how long the answer is held without a reader. Raises BadRequestError, InvalidRequest."""
        seconds = self._attachments.timeout_of(messages[0])
        if is_stream:
            return seconds
        if messages[0].HasField("detach_timeout") and seconds:
            raise BadRequestError(
                f"detach_timeout={seconds:g} without stream: only streams can be read in parts", param="detach_timeout"
            )
        return 0.0

    def answer(
        self,
        chunks: AsyncGenerator[Piece, None],
        events: AsyncGenerator[Event, None],
        request_id: str,
        seconds: float,
        *,
        is_single: bool = True,
        has_long: bool = False,
    ) -> EventStream:
        """Answers with a stream. chunks: made of events; they may have a LongPiece if has_long, and `seconds` is 0.
        seconds: from seconds_of(). is_single: of one prompt.

        Raises DuplicateRequest: then the generators are to be closed."""
        if not seconds:
            return EventStream(chunks, events, has_long=has_long)

        async def take() -> list[Piece]:
            piece = await anext(chunks, None)
            return [] if piece is None else [piece]

        async def end() -> None:
            await chunks.aclose()
            await events.aclose()

        identity = caller()
        held = HeldStream(
            self._held,
            scoped_id=identity.scoped_id(request_id),
            tenant=identity.tenant,
            timeout=seconds,
            protocol="http",
            transcript=Transcript(take, _size_of, self._attachments.kept_bytes),
            end=end,
            is_single=is_single,
        )
        self._held.add(held)
        return _stream(_Reading(self._attachments, held, 0), request_id)

    def read_here(self, scoped_id: str, position: int) -> "_Reading | None":
        """Begins to read a stream that was begun here; None if everything has been read.

        scoped_id: Request.scoped_id. position: events that the client has. Raises RequestError.
        """
        request_id = scoped_id.rpartition("/")[2]
        held = self._attachments.find(request_id, scoped_id)
        if held.protocol != "http":
            raise InvalidRequest(f"request_id={request_id!r} was asked for over gRPC: call Attach there")
        transcript = held.transcript
        if position > transcript.end:
            raise InvalidRequest(f"Last-Event-ID={position}, but only {transcript.end} events have been sent")
        transcript.check_position(position, "Last-Event-ID")
        if transcript.is_over and position == transcript.end:
            return None
        return _Reading(self._attachments, held, position)

    async def _go_on(self, request: Request) -> Response:
        request_id, scoped_id = _ids(request)
        position = _position(request)
        peers = self._attachments.peers
        reading: _Reading | _PeersReading | None
        if self._held.find(scoped_id) is None and (found := await peers.find(scoped_id)) and found[1].held_over:
            reading = await _PeersReading(peers.read_events(found[0], scoped_id, position)).begin()
        else:
            reading = self.read_here(scoped_id, position)
        if reading is None:
            # Tells browsers not to come again.
            return Response(status_code=HTTPStatus.NO_CONTENT)
        return _stream(reading, request_id)

    async def _end(self, request: Request) -> Response:
        request_id, scoped_id = _ids(request)
        peers = self._attachments.peers
        is_gone = self._held.drop(scoped_id)
        if not (is_gone and peers.are_none):
            is_gone = await peers.drop(scoped_id) or is_gone
        if not is_gone:
            self._attachments.find(request_id, scoped_id)
        return JSONResponse({"id": request_id, "object": "stream", "deleted": True})


def _ids(request: Request) -> tuple[str, str]:
    """Returns the id in the path, and the one that is unique over all tenants. Raises InvalidRequest."""
    request_id = request.path_params["request_id"]
    check_request_id(request_id)
    return request_id, caller().scoped_id(request_id)


def _stream(reading: "_Reading | _PeersReading", request_id: str) -> EventStream:
    answer = EventStream(reading.pieces(), reading)
    answer.headers["x-request-id"] = request_id
    return answer


class _Reading:
    """One client's reading of a stream. Each event has its number as id, from 1."""

    def __init__(self, attachments: Attachments, held: HeldStream, position: int) -> None:
        self._streams, self._held = attachments.held, held
        self._reader = self._streams.begin_reading(held, position)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        reader = self._reader
        try:
            while taken := await reader.take():
                first = reader.position - len(taken) + 1
                for number, piece in enumerate(taken, first):
                    yield {"id": str(number), **piece}
        except RequestError as error:
            # Another reader has the stream: this event is no part of it.
            yield {"data": msgspec.json.encode(body_of(error)).decode()}

    async def aclose(self) -> None:
        self._streams.end_reading(self._held, self._reader)


class _PeersReading:
    """The same for a stream that another router process holds."""

    def __init__(self, events: AsyncGenerator[StreamEvent, None]) -> None:
        self._events = events

    async def begin(self) -> "_PeersReading | None":
        """Returns this, or None if everything has been read. Raises RequestError."""
        return None if await anext(self._events, None) is None else self

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            async for event in self._events:
                fields = {"id": event.id, "event": event.event, "data": event.data}
                yield {name: value for name, value in fields.items() if value}
        except RequestError as error:
            yield {"data": msgspec.json.encode(body_of(error)).decode()}

    async def aclose(self) -> None:
        await self._events.aclose()


def _position(request: Request) -> int:
    """Returns how many events the client has. Raises BadRequestError."""
    given = request.headers.get(_LAST_EVENT, "0")
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise BadRequestError(
            f"Last-Event-ID={given[:40]!r}: give the id of the last event that has come, or none", param="Last-Event-ID"
        )
    return int(given)


def _size_of(piece: Any) -> int:
    return sum(map(len, piece.values())) + _EVENT_BYTES
