"""The HTTP endpoints."""

import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from router.api.console.pages import Console
from router.api.encoded import PART_BYTES, EncodedText, uncounted
from router.api.gateway.answers import HeldEvents, answered, collected, request_id_of, sent_tokens, sent_whole
from router.api.gateway.anthropic.errors import is_anthropics, message_error
from router.api.gateway.anthropic.reply import MessageReply
from router.api.gateway.batches.endpoints import Batches
from router.api.gateway.batches.runner import Runner
from router.api.gateway.batches.store import BatchStore
from router.api.gateway.errors import (
    MODEL_NOT_FOUND,
    OUTPUT_ERRORS,
    BadRequestError,
    body_of,
    headers_of,
    http_status,
    of_output,
)
from router.api.gateway.events import Event, events_of, in_intervals, parse_outputs
from router.api.gateway.ignored import HEADER, IgnoredFields
from router.api.gateway.openai.chat import BatchReply, ChatReply
from router.api.gateway.openai.completion import CompletionReply
from router.api.gateway.openai.form import BatchForm, Form, parsed
from router.api.gateway.openai.reply import Reply
from router.api.gateway.openapi.pages import Pages
from router.api.gateway.reading.bodies import Bodies
from router.api.gateway.reading.parsing import Kind, Parsed
from router.api.gateway.responding import Responses
from router.api.gateway.responses.store import MemoryStore, Store
from router.errors import Forbidden, RequestError
from router.intake.attach.attachments import Attachments
from router.intake.attach.held_streams import HeldStreams
from router.intake.intake import Intake
from router.request.values import check_model_name, check_prompt_length
from router.security.authentication import KeyMiddleware
from router.security.identity import ANYONE, Identity, caller
from router.security.keys import Keys
from router.security.web_pages import Refusal, WebPageMiddleware, WebPageRules
from router.streams.whole_answers import AnswerRoom
from router.telemetry.call_context import TraceMiddleware
from runtime.wire import octavo_version

log = logging.getLogger("octavo.router.gateway")

# Endpoints of vLLM's that need models which are not served yet.
_NOT_YET = (
    *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations"),
)
# Bytes of stored responses, where no store is given.
_MEMORY_BYTES = 2**24
# Bytes of an answer in a batch's output, which are joined on the event loop: 45 ms.
_MAX_LINE_BYTES = 64 * 2**20


class Gateway:
    """The HTTP gateway; `app` is its ASGI application."""

    def __init__(
        self,
        intake: Intake,
        registry: CollectorRegistry,
        readiness: Callable[[], tuple[bool, str]],
        *,
        max_body_bytes: int,
        max_bodies_bytes: int = 2**28,
        strict_fields: bool = False,
        allowed_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        keys: Keys | None = None,
        responses: Store | None = None,
        batches: BatchStore | None = None,
        batch_concurrency: int = 32,
        is_tracing: bool = False,
        attachments: Attachments | None = None,
        console: Console | None = None,
    ) -> None:
        """readiness: for /health. max_body_bytes: of one request. max_bodies_bytes, strict_fields, allowed_origins,
        allowed_hosts: the options. keys: those that may call; None: anyone may. responses: where they are stored;
        None: in memory. batches: where files and batches are; None: there are none. batch_concurrency: the option.
        is_tracing: requests are traced. attachments: for streams without a reader, console: the page; None: none."""
        self._intake, self._registry, self._readiness = intake, registry, readiness
        self._bodies = Bodies(
            intake, max_bytes=max_body_bytes, max_total_bytes=max_bodies_bytes, is_strict=strict_fields
        )
        self._ignored = IgnoredFields(intake.metrics.ignored_fields)
        store = MemoryStore(_MEMORY_BYTES) if responses is None else responses
        none = HeldStreams(0, intake.metrics.detached_streams)
        self._held = HeldEvents(Attachments(intake, none) if attachments is None else attachments)
        own = Responses(intake, self._bodies, self._ignored, store, self._held).routes
        completions = [
            Route("/v1/completions", functools.partial(self._complete, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(self._complete, "chat"), methods=["POST"]),
        ]
        self.web_pages = WebPageRules(allowed_hosts, allowed_origins) if keys is None else None
        self._runner: Runner | None = None
        if batches is not None:
            # Lines of batches have been let in already, with their tenant's identity.
            lines = Starlette(routes=[*completions, *own], exception_handlers=_HANDLERS)
            lines.state.max_answer_bytes = _MAX_LINE_BYTES
            self._runner = Runner(
                batches,
                lines,
                _nobody if keys is None else keys.of_tenant,
                registry,
                concurrency=batch_concurrency,
                max_line_bytes=max_body_bytes,
            )
        self.app = Starlette(
            routes=[
                *completions,
                Route("/v1/chat/completions/batch", functools.partial(self._complete, "batch"), methods=["POST"]),
                Route("/v1/messages", functools.partial(self._complete, "messages"), methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/invocations", functools.partial(self._complete, "any"), methods=["POST"]),
                *own,
                *self._held.routes,
                *Batches(self._bodies, self._ignored, batches, self._runner, strict_fields).routes,
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/version", self._version),
                Route("/load", self._load),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/metrics", self._metrics),
                *Pages(lambda: self.app.routes, _not_yet).routes,
                *([] if console is None else console.routes),
                *(Route(path, _not_yet, methods=["POST"]) for path in _NOT_YET),
            ],
            middleware=[
                *([Middleware(TraceMiddleware)] if is_tracing else []),
                *([Middleware(CORSMiddleware, **_cors(allowed_origins))] if allowed_origins else []),
                *([] if keys is None else [Middleware(KeyMiddleware, keys=keys, refuse=_refusal)]),
                *([Middleware(WebPageMiddleware, rules=self.web_pages, refuse=_no_page)] if self.web_pages else []),
            ],
            exception_handlers=_HANDLERS,
        )

    def start(self) -> None:
        """Runs batches from now on."""
        if self._runner is not None:
            self._runner.start()

    def leave(self) -> None:
        """Takes no more lines of batches."""
        if self._runner is not None:
            self._runner.leave()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.stop()

    # --- Completions

    async def _complete(self, kind: Kind, request: Request) -> Response:
        with contextlib.ExitStack() as held:
            return await self._completed(kind, request, held)

    async def _completed(self, kind: Kind, request: Request, held: contextlib.ExitStack) -> Response:
        request_id = request_id_of(request)
        asked = await self._bodies.parse(request, kind, request_id, held)
        messages, form, tokens = asked.take_requests(), asked.form, self._intake.tokenizer.tokenizer
        if parse_outputs(self._intake, messages):
            form = parsed(form)
        request_id = messages[0].request_id if len(messages) == 1 else request_id
        room, grow = None, uncounted
        if not form.is_stream:
            most = getattr(request.app.state, "max_answer_bytes", None)
            room = self._intake.answers.begin((each.sampling for each in messages), self._intake.max_model_len, most)
            grow = room.grow
        if asked.kind == "chat":
            reply: Reply = ChatReply(form, self._base(f"chatcmpl-{request_id}"), tokens, grow)
        elif asked.kind == "batch":
            assert isinstance(form, BatchForm)
            reply = BatchReply(form, self._base(f"chatcmpl-{request_id}"), tokens, grow)
        elif asked.kind == "messages":
            reply = MessageReply(form, f"msg_{request_id}", self._intake.model.name, tokens)
        else:
            echoes = [await self._text_of(message) for message in messages] if form.has_echo else []
            reply = CompletionReply(form, self._base(f"cmpl-{request_id}"), len(messages), echoes, tokens, grow)
        try:
            answer = await self._answer(request, messages, form, reply, room)
        except OUTPUT_ERRORS as error:
            raise of_output(error, form.constraint_field, form.schema_field) from None
        self._ignored.tell(asked.ignored, answer)
        return answer

    async def _text_of(self, message: pb.GenerateRequest) -> str:
        if message.HasField("prompt"):
            return message.prompt
        token_ids = message.token_ids.ids
        check_prompt_length(len(token_ids), self._intake.model)
        return await self._intake.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _base(self, name: str) -> dict[str, Any]:
        return {"id": name, "created": int(time.time()), "model": self._intake.model.name}

    async def _answer(
        self, request: Request, messages: list[pb.GenerateRequest], form: Form, reply: Reply, room: AnswerRoom | None
    ) -> Response:
        """room: None: the answer is a stream."""
        # Prompts of one request have its id, and their number.
        is_single = len(messages) == 1
        request_id = messages[0].request_id if is_single else messages[0].request_id.removesuffix("-0")
        seconds = self._held.seconds_of(messages, is_stream=form.is_stream)
        events = events_of(self._intake, messages, are_kept=seconds > 0, is_whole=room is not None)
        if form.stream_interval > 1 and form.is_stream:
            events = in_intervals(events, form.stream_interval)
        if form.has_prompt_text:
            events = self._with_prompt_text(events, reply)
        if room is not None:
            return await answered(request, collected(events, reply, room))
        try:
            # Until there is something to stream, an error can still set the HTTP status.
            first = await anext(events)
            chunks = _sse_chunks(first, events, reply, request_id=request_id)
            return self._held.answer(chunks, events, request_id, seconds, is_single=is_single)
        except BaseException:
            await events.aclose()
            raise

    async def _with_prompt_text(self, events: AsyncGenerator[Event, None], reply: Reply) -> AsyncGenerator[Event, None]:
        async with aclosing(events):
            async for prompt, event in events:
                if event.HasField("started"):
                    token_ids = event.started.prompt_token_ids
                    text = await self._intake.tokenizer.decode(token_ids, skip_special_tokens=False)
                    reply.show_prompt(prompt, text)
                yield prompt, event

    # --- Tokens

    async def _tokenize(self, request: Request) -> Response:
        asked, token_ids = await self._tokens(request, "tokenize")
        shown = {"count": len(token_ids), "max_model_len": self._intake.max_model_len}
        table = self._intake.tokenizer.tokenizer if asked.form.has_token_ids else None
        answer = await sent_tokens(shown, token_ids, table, self._intake.answers.begin((), 0))
        self._ignored.tell(asked.ignored, answer)
        return answer

    async def _count_tokens(self, request: Request) -> Response:
        asked, token_ids = await self._tokens(request, "count_tokens")
        answer = JSONResponse({"input_tokens": len(token_ids)})
        self._ignored.tell(asked.ignored, answer)
        return answer

    async def _tokens(self, request: Request, kind: Kind) -> tuple[Parsed, list[int]]:
        with contextlib.ExitStack() as held:
            asked = await self._bodies.parse(request, kind, request_id_of(request), held)
            (message,) = asked.messages
            assert isinstance(message, pb.TokenizeRequest)
            self._check_model(message.model)
            return asked, await self._intake.tokenize(message)

    async def _detokenize(self, request: Request) -> Response:
        with contextlib.ExitStack() as held:
            asked = await self._bodies.parse(request, "detokenize", request_id_of(request), held)
            (message,) = asked.messages
            assert isinstance(message, pb.DetokenizeRequest)
            self._check_model(message.model)
            text = await self._intake.detokenize(message)
            room = self._intake.answers.begin((), 0)
            shown = EncodedText(grow=room.grow)
            steps = (shown.add(text[start : start + PART_BYTES]) for start in range(0, len(text), PART_BYTES))
            return await sent_whole({"prompt": shown}, room, steps)

    def _check_model(self, name: str) -> None:
        check_model_name(name, self._intake.model_name)

    # --- The others

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_json(self._intake.model)]})

    async def _model(self, request: Request) -> Response:
        name, model = request.path_params["model"], self._intake.model
        if name != model.name:
            message = f"model={name!r} is not served here: use {model.name!r}"
            raise BadRequestError(message, param="model", status=HTTPStatus.NOT_FOUND, code=MODEL_NOT_FOUND)
        return JSONResponse(_model_json(model))

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": octavo_version()})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._intake.num_streams})

    async def _health(self, request: Request) -> Response:
        """Tells no more than whether requests are served. Why not, with addresses, is told on metrics_port."""
        is_ready, _ = self._readiness()
        if is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        if not caller().is_admin:
            raise Forbidden("/metrics tells about all tenants: use an admin's API key, or metrics_port")
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


async def _sse_chunks(
    first: Event, rest: AsyncGenerator[Event, None], reply: Reply, *, request_id: str
) -> AsyncGenerator[dict[str, str], None]:
    try:
        event: Event | None = first
        while event is not None:
            for piece in reply.pieces(*event):
                yield piece
            event = await anext(rest, None)
    except RequestError as error:
        yield reply.error_piece(error)
    except Exception as error:
        log.exception("a stream failed", extra={"request_id": request_id})
        yield reply.error_piece(error)
    else:
        for piece in reply.last_pieces():
            yield piece


def _model_json(model: pb.ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "octavo",
        "max_model_len": model.max_model_len,
    }


def _refusal(error: Exception, path: str) -> Response:
    body = message_error(error) if is_anthropics(path) else body_of(error)
    return JSONResponse(body, http_status(error), headers_of(error))


def _no_page(refusal: Refusal, path: str) -> Response:
    return _refusal(BadRequestError(refusal.message, status=refusal.status, code=refusal.code), path)


async def _refused(request: Request, error: Exception) -> Response:
    return _refusal(error, request.url.path)


async def _not_yet(request: Request) -> Response:
    message = f"{request.url.path}: this server completes text and chats; it has no such models yet"
    return _refusal(BadRequestError(message, status=HTTPStatus.NOT_FOUND), request.url.path)


def _cors(origins: Sequence[str]) -> dict[str, Any]:
    """Options of CORSMiddleware. Keys travel in a header, not in cookies, so credentials are not needed."""
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": [HEADER, "Retry-After"],
    }


async def _left(request: Request, error: Exception) -> Response:
    """Nobody reads this answer: the client has gone while it sent its body."""
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def _failed(request: Request, error: Exception) -> Response:
    log.exception("%s failed", request.url.path, exc_info=error)
    return _refusal(error, request.url.path)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _refusal(BadRequestError(message, status=HTTPStatus(error.status_code)), request.url.path)


def _nobody(tenant: str, key_digest: str) -> Identity | None:
    """Identifies callers without keys."""
    return None if tenant else ANYONE


_HANDLERS: dict[Any, Any] = {
    RequestError: _refused,
    BadRequestError: _refused,
    ClientDisconnect: _left,
    HTTPException: _no_such_page,
    Exception: _failed,
}
