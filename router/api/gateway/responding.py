"""The endpoints of OpenAI's Responses API."""

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from itertools import chain
from typing import Any, Self

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from router.api.encoded import encode, parts_of
from router.api.gateway.answers import HeldEvents, LongPiece, answered, collected, request_id_of
from router.api.gateway.errors import OUTPUT_ERRORS, BadRequestError, of_output
from router.api.gateway.events import Event, events_of, parse_outputs
from router.api.gateway.ignored import IgnoredFields
from router.api.gateway.openai.form import ASSISTANT
from router.api.gateway.reading.bodies import Bodies
from router.api.gateway.responses.convert import ResponseForm
from router.api.gateway.responses.reply import ResponseReply
from router.api.gateway.responses.store import Store, StoreError
from router.errors import RequestError, Unavailable
from router.intake.intake import Intake
from router.security.identity import caller
from router.streams.whole_answers import AnswerRoom

log = logging.getLogger("octavo.router.gateway")

# A longer conversation can't be continued: reading it would hold up other streams.
MAX_STORED_BYTES = 8 * 2**20

# A part of a message that is an image to fetch.
_URL = "image_url"

# Writes a response to the store, if that is asked for.
_Keep = Callable[[], Awaitable[None]]


class _Said(msgspec.Struct, array_like=True):
    role: str
    text: str
    # Id, name and arguments of each.
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""
    reasoning: str = ""
    # Type and text or URL of each, of a message with images; files of the request's own are left out.
    parts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: pb.ChatMessage) -> Self:
        calls = tuple((call.id, call.name, call.arguments) for call in message.tool_calls)
        parts = tuple(
            (_URL, part.item.image.url) if part.HasField("item") else ("text", part.text) for part in message.parts
        )
        return cls(message.role, message.content, calls, message.tool_call_id, message.reasoning, parts)

    @property
    def num_chars(self) -> int:
        """Characters that may be many."""
        nested = chain.from_iterable((*self.calls, *self.parts))
        return len(self.text) + len(self.reasoning) + sum(map(len, nested))

    def message(self) -> pb.ChatMessage:
        calls = [pb.ToolCall(id=call_id, name=name, arguments=arguments) for call_id, name, arguments in self.calls]
        return pb.ChatMessage(
            role=self.role,
            content=self.text,
            parts=[
                pb.ContentPart(item=pb.Item(image=pb.Image(url=text))) if kind == _URL else pb.ContentPart(text=text)
                for kind, text in self.parts
            ],
            tool_calls=calls,
            tool_call_id=self.call_id,
            reasoning=self.reasoning,
        )


class _Stored(msgspec.Struct):
    """A response, and the conversation up to its end, without instructions."""

    response: msgspec.Raw
    conversation: list[_Said]


class Responses:
    def __init__(self, intake: Intake, bodies: Bodies, ignored: IgnoredFields, store: Store, held: HeldEvents) -> None:
        self._intake, self._bodies, self._ignored, self._store, self._held = intake, bodies, ignored, store, held
        self.routes = [
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/{response_id}", self._show, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._delete, methods=["DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        with contextlib.ExitStack() as held:
            return await self._created(request, held)

    async def _created(self, request: Request, held: contextlib.ExitStack) -> Response:
        asked = await self._bodies.parse(request, "response", request_id_of(request), held)
        form, messages = asked.form, asked.take_requests()
        (message,) = messages
        assert isinstance(form, ResponseForm)
        if parse_outputs(self._intake, messages):
            form = replace(form, is_parsed=True)
        said = list(map(_Said.of, message.chat.messages[form.has_instructions :]))
        # A stored conversation has no files: they would take the place of thousands of others.
        can_be_stored = not any(
            part.item.image.HasField("data") for each in message.chat.messages for part in each.parts
        )
        if form.previous:
            earlier = await self._conversation(form.previous)
            said = earlier + said
            own = list(message.chat.messages[form.has_instructions :])
            del message.chat.messages[form.has_instructions :]
            message.chat.messages.extend(each.message() for each in earlier)
            message.chat.messages.extend(own)
        response_id, model = f"resp_{uuid.uuid4().hex}", self._intake.model.name
        # A stream's last event has the whole response, too.
        most = getattr(request.app.state, "max_answer_bytes", None)
        room = self._intake.answers.begin((message.sampling,), self._intake.max_model_len, most)
        tokens = self._intake.tokenizer.tokenizer
        reply = ResponseReply(form, response_id, int(time.time()), model, tokens, room.grow)
        keep = functools.partial(self._keep, response_id, reply, said) if form.is_stored else _keep_nothing
        if form.is_stored and not can_be_stored:
            reply.not_stored()
            keep = _keep_nothing
        request_id, seconds = message.request_id, self._held.seconds_of([message], is_stream=form.is_stream)
        del message
        events = events_of(self._intake, messages, are_kept=seconds > 0, is_whole=not form.is_stream)
        try:
            if form.is_stream:
                answer = await self._stream(events, reply, room, keep, request_id, seconds)
            else:
                answer = await answered(request, collected(events, reply, room, keep))
        except OUTPUT_ERRORS as error:
            raise of_output(error, form.constraint_field, form.schema_field) from None
        self._ignored.tell(asked.ignored, answer)
        return answer

    async def _stream(
        self,
        events: AsyncGenerator[Event, None],
        reply: ResponseReply,
        room: AnswerRoom,
        keep: _Keep,
        request_id: str,
        seconds: float,
    ) -> Response:
        """seconds: for which it is held without a reader."""
        try:
            # Until there is something to stream, an error can still set the HTTP status.
            first = await anext(events)
            chunks = _sse_events(first, events, reply, room, keep, request_id, is_held=seconds > 0)
            return self._held.answer(chunks, events, request_id, seconds, has_long=True)
        except BaseException:
            await events.aclose()
            raise

    async def _show(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise BadRequestError("stream: a stored response is answered whole; leave it out", param="stream")
        stored = await self._read(request.path_params["response_id"])
        if stored is None:
            raise _not_found(request)
        return Response(bytes(stored.response), media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        try:
            is_deleted = await self._store.delete(caller().tenant, response_id)
        except StoreError as error:
            raise _unavailable(error) from None
        if not is_deleted:
            raise _not_found(request)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    # --- The store

    async def _conversation(self, response_id: str) -> list[_Said]:
        """Raises BadRequestError, Unavailable."""
        stored = await self._read(response_id)
        if stored is None:
            raise BadRequestError(
                f"previous_response_id={response_id[:80]!r} is not stored here (any more): send the conversation "
                "as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.conversation

    async def _read(self, response_id: str) -> _Stored | None:
        """Raises Unavailable."""
        try:
            data = await self._store.get(caller().tenant, response_id)
            return None if data is None else msgspec.json.decode(data, type=_Stored)
        except (StoreError, msgspec.DecodeError) as error:
            raise _unavailable(error) from None

    async def _keep(self, response_id: str, reply: ResponseReply, said: list[_Said]) -> None:
        answer = _Said(ASSISTANT, reply.text, reply.calls, reasoning=reply.reasoning)
        data = _stored(reply.whole(), [*said, answer])
        try:
            if data is None or not await self._store.put(caller().tenant, response_id, data):
                reply.not_stored()
        except StoreError as error:
            # The answer itself is good, and says that it is not stored.
            log.error("a response could not be stored: %s", error)
            reply.not_stored()


def _stored(whole: dict[str, Any], conversation: list[_Said]) -> bytes | None:
    """Returns what the store gets; None: it is longer than MAX_STORED_BYTES, of which little more is encoded."""
    response, room = [], MAX_STORED_BYTES - sum(each.num_chars for each in conversation)
    for part in parts_of(whole):
        response.append(part)
        room -= len(part)
        if room < 0:
            return None
    data = msgspec.json.encode(_Stored(msgspec.Raw(b"".join(response)), conversation))
    return data if len(data) <= MAX_STORED_BYTES else None


async def _keep_nothing() -> None:
    pass


async def _sse_events(
    first: Event,
    rest: AsyncGenerator[Event, None],
    reply: ResponseReply,
    room: AnswerRoom,
    keep: _Keep,
    request_id: str,
    *,
    is_held: bool,
) -> AsyncGenerator[dict[str, str], None]:
    # The last ones have all logprobs. Those that are held for a reader to come are kept as they are sent.
    sse_of_all = _sse if is_held else _long_sse
    try:
        for shown in reply.opening():
            yield _sse(shown)
        event: Event | None = first
        while event is not None:
            for shown in reply.delta(*event):
                yield _sse(shown)
            event = await anext(rest, None)
        for shown in reply.closing():
            yield sse_of_all(shown)
        # The client may continue the response as soon as it has the last event.
        await keep()
        yield sse_of_all(reply.last())
    except RequestError as error:
        yield _sse(reply.failed(error))
    except Exception as error:
        log.exception("a stream failed", extra={"request_id": request_id})
        yield _sse(reply.failed(error))
    finally:
        room.close()


def _sse(shown: dict[str, Any]) -> dict[str, str]:
    return {"event": shown["type"], "data": encode(shown).decode()}


def _long_sse(shown: dict[str, Any]) -> dict[str, str]:
    return LongPiece(shown["type"], shown)


def _not_found(request: Request) -> BadRequestError:
    response_id = request.path_params["response_id"]
    message = f"response {response_id[:80]!r} is not stored here (any more)"
    return BadRequestError(message, status=HTTPStatus.NOT_FOUND, code="response_not_found")


def _unavailable(error: Exception) -> Unavailable:
    log.error("stored responses can't be used: %s", error)
    return Unavailable("stored responses can't be used now: send the conversation as input, or try again later")
