"""The HTTP endpoints."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from protos import inference_pb2 as pb
from router.api.gateway.convert import chat_message, completion_messages
from router.api.gateway.errors import BadRequestError, body_of, headers_of, http_status, of_validation
from router.api.gateway.events import Event, events_of
from router.api.gateway.replies import ChatReply, CompletionReply
from router.api.gateway.schemas import ChatCompletionRequest, CompletionRequest, SamplingRequest
from router.errors import RequestError
from router.intake.intake import Intake
from router.security.authentication import KeyMiddleware
from router.security.keys import Keys
from router.streams import outbox
from router.telemetry.call_context import TraceMiddleware

# For the body of one.
BODY_S = 60.0


log = logging.getLogger("octavo.router.gateway")

_RequestT = TypeVar("_RequestT", bound=BaseModel)


class Reply(Protocol):
    """Folds a stream's events."""

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None: ...

    def usage_chunk(self) -> dict[str, Any]: ...

    def whole(self) -> dict[str, Any]: ...


class Gateway:
    """Its `app` is an ASGI application."""

    def __init__(
        self,
        intake: Intake,
        registry: CollectorRegistry,
        readiness: Callable[[], tuple[bool, str]],
        *,
        max_body_bytes: int,
        keys: Keys | None = None,
        is_tracing: bool = False,
    ) -> None:
        """readiness: for /health. keys: those that may call; None: anyone may. is_tracing: requests are traced."""
        self._intake, self._registry, self._readiness = intake, registry, readiness
        self._max_body_bytes = max_body_bytes
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=[
                *([Middleware(TraceMiddleware)] if is_tracing else []),
                *([] if keys is None else [Middleware(KeyMiddleware, keys=keys, refuse=_refusal)]),
            ],
            exception_handlers={Exception: _failed, HTTPException: _no_such_page},
        )

    # --- Completions

    async def _complete(self, request: Request) -> Response:
        try:
            asked = await self._read(request, CompletionRequest)
            request_id = _request_id(request)
            messages = completion_messages(asked, request_id)
            echoes = [await self._text_of(prompt) for prompt in asked.prompts] if asked.echo else []
            reply = CompletionReply(asked, self._base(f"cmpl-{request_id}"), echoes)
            return await self._answer(request, asked, messages, reply)
        except (RequestError, BadRequestError) as error:
            return _refusal(error)

    async def _chat(self, request: Request) -> Response:
        try:
            asked = await self._read(request, ChatCompletionRequest)
            request_id = _request_id(request)
            message = chat_message(asked, request_id)
            reply = ChatReply(asked, self._base(f"chatcmpl-{request_id}"))
            return await self._answer(request, asked, [message], reply)
        except (RequestError, BadRequestError) as error:
            return _refusal(error)

    async def _read(self, request: Request, schema: type[_RequestT]) -> _RequestT:
        """Raises BadRequestError."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read_body(request)
        except TimeoutError:
            message = f"the body has not come within {BODY_S:g} s"
            raise BadRequestError(message, status=HTTPStatus.REQUEST_TIMEOUT) from None
        try:
            return schema.model_validate_json(body)
        except ValidationError as error:
            raise of_validation(error) from None

    async def _read_body(self, request: Request) -> bytearray:
        """Raises BadRequestError."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                raise BadRequestError(
                    f"the body has more than max_message_bytes={self._max_body_bytes}",
                    status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                )
        return body

    async def _text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._intake.tokenizer.decode(prompt, skip_special_tokens=True)

    def _base(self, name: str) -> dict[str, Any]:
        return {"id": name, "created": int(time.time()), "model": self._intake.model.name}

    async def _answer(
        self, request: Request, asked: SamplingRequest, messages: Sequence[pb.GenerateRequest], reply: Reply
    ) -> Response:
        events = events_of(self._intake, messages)
        if not asked.stream:
            return await _whole(request, events, reply)
        try:
            # Until there is something to stream, an error can still be the status.
            first = await anext(events)
        except BaseException:
            await events.aclose()
            raise
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = _sse_chunks(first, events, reply, with_usage=with_usage, request_id=messages[0].request_id)
        return _Stream(chunks, events)

    # --- The others

    async def _models(self, request: Request) -> Response:
        try:
            return JSONResponse({"object": "list", "data": [_model_json(self._intake.model)]})
        except RequestError as error:
            return _refusal(error)

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        try:
            model = self._intake.model
        except RequestError as error:
            return _refusal(error)
        if name != model.name:
            message = f"model={name!r} is not served here: use {model.name!r}"
            return _refusal(BadRequestError(message, param="model", status=HTTPStatus.NOT_FOUND))
        return JSONResponse(_model_json(model))

    async def _health(self, request: Request) -> Response:
        is_ready, line = self._readiness()
        return PlainTextResponse(f"{line}\n", HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _Stream(EventSourceResponse):
    """Ends its source with the client's connection, also if nobody has asked for a chunk yet, or if a chunk can't be
    sent for so long that nobody seems to read."""

    def __init__(self, chunks: AsyncGenerator[dict[str, str], None], source: AsyncGenerator[Event, None]) -> None:
        super().__init__(chunks, send_timeout=outbox.UNREAD_S)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            log.info("a client has read nothing for %g s: its stream ends", outbox.UNREAD_S)
        finally:
            await self._source.aclose()


async def _sse_chunks(
    first: Event, rest: AsyncGenerator[Event, None], reply: Reply, *, with_usage: bool, request_id: str
) -> AsyncGenerator[dict[str, str], None]:
    try:
        event: Event | None = first
        while event is not None:
            if (chunk := reply.take(*event)) is not None:
                yield _data(chunk)
            event = await anext(rest, None)
        if with_usage:
            yield _data(reply.usage_chunk())
    except RequestError as error:
        yield _data(body_of(error))
    except Exception as error:
        log.exception("a stream failed", extra={"request_id": request_id})
        yield _data(body_of(error))
    else:
        yield {"data": "[DONE]"}


def _data(content: dict[str, Any]) -> dict[str, str]:
    return {"data": msgspec.json.encode(content).decode()}


async def _whole(request: Request, events: AsyncGenerator[Event, None], reply: Reply) -> Response:
    """Raises RequestError. A client that goes away ends its streams."""

    async def collect() -> Response:
        async with aclosing(events):
            async for event in events:
                reply.take(*event)
        return JSONResponse(reply.whole())

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, gone = asyncio.create_task(collect()), asyncio.create_task(until_gone())
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        # Of a client that has gone nobody reads this.
        return collecting.result() if collecting.done() else Response(status_code=HTTPStatus.NO_CONTENT)
    finally:
        for task in (collecting, gone):
            task.cancel()
        await asyncio.gather(collecting, gone, return_exceptions=True)


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex


def _model_json(model: pb.ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name, "object": "model", "created": 0, "owned_by": "octavo", "max_model_len": model.max_model_len
    }  # fmt: skip


def _refusal(error: Exception) -> Response:
    return JSONResponse(body_of(error), http_status(error), headers_of(error))


async def _failed(request: Request, error: Exception) -> Response:
    log.exception("%s failed", request.url.path, exc_info=error)
    return _refusal(error)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _refusal(BadRequestError(message, status=HTTPStatus(error.status_code)))
