"""Opens a stream for a request of any protocol: has it resolved, then places it on a replica."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from protos import inference_pb2 as pb
from router.accepted import EndedRequest, Request, RequestTrace
from router.errors import DeadlineExceeded, Draining, InvalidRequest, RequestError
from router.intake.admission import Admission
from router.intake.live import LiveRequests
from router.intake.media.items import Items, RequestItems
from router.intake.new_streams import NewStreams
from router.intake.served import RouterText, ServedModel
from router.request.features.beams import num_streams
from router.request.media.asked import asked_items
from router.request.pipeline import resolve
from router.request.prompts import tokens_of
from router.request.values import MAX_TOKENIZED, check_detokenized
from router.security.identity import caller
from router.security.message_memory import release
from router.streams.stream import Stream
from router.streams.whole_answers import WholeAnswers
from router.telemetry.requests import RequestTelemetry
from router.text.tokenizer import TooManyTokensError

# Bytes of a message besides the resume that a stream keeps.
_MOST_KEPT_BYTES = 65_536
# To check the tokens of longer prompts, and to copy them into Started, takes 5 ms and more each.
_LONG_PROMPT = 2**18


class Intake:
    def __init__(
        self,
        model: ServedModel,
        text: RouterText,
        items: Items,
        *,
        admission: Admission,
        streams: NewStreams,
        live: LiveRequests,
        answers: WholeAnswers,
        telemetry: RequestTelemetry,
    ) -> None:
        """live: cancels and moves requests. answers: room for answers that come whole."""
        # `drain` or `stop` has been called.
        self.draining = False
        self.model_name = model.name
        self.tokenizer = text.encoder
        self.metrics = streams.metrics
        self.items = items
        self.live = live
        self.answers = answers
        self._model, self._text = model, text
        self._admission = admission
        self._streams = streams
        self._telemetry = telemetry

    def drain(self) -> None:
        """Refuses new requests, and ends those that no replica computes: another router may have a replica for them."""
        self.draining = True
        self._streams.dispatcher.end_parked(
            Draining("this router is shutting down, and no replica computes this request: resume at another router")
        )

    def stop(self) -> None:
        """Refuses new requests, and ends all live ones, which clients may resume."""
        self.draining = True
        self._streams.registry.fail_all(
            Draining("this router is shutting down: resume at another one, or once it is back")
        )

    @property
    def num_streams(self) -> int:
        return len(self._streams.registry)

    @property
    def model(self) -> pb.ModelInfo:
        """The served model. Raises NoReplica."""
        return self._model.info

    @property
    def max_model_len(self) -> int:
        """The served model's max_model_len; 0: not known yet."""
        return self._model.max_model_len

    @property
    def takes_items(self) -> bool:
        """True if the served model takes images or videos, as far as is known."""
        return bool(self._model.media_json)

    @property
    def max_item_bytes(self) -> int:
        """The most bytes of images and videos that a request may have; 0: it has none."""
        limits = self.items.limits
        return limits.max_request_bytes if limits.takes_items and self.takes_items else 0

    def parses(self, chat: pb.ChatPrompt) -> bool:
        """True if the served model's outputs can have reasoning or tool calls beside the answer."""
        return self._text.outputs.are_parsed(chat)

    @contextlib.asynccontextmanager
    async def open(self, message: pb.GenerateRequest, seconds: float | None) -> AsyncIterator[Stream]:
        """Opens a stream for as long as its client's call lasts, and frees what it holds when the call ends.

        The stream belongs to the caller (security.identity.caller), and counts against the limits of the caller's key.

        message: with a request_id; not held once the stream is open, for it may be large. seconds: until the client's
        deadline, if it has one. Raises RequestError.
        """
        outcome, failure = "cancelled", ""  # by the client or its deadline, unless something else comes first
        identity = caller()
        limits = identity.limits
        request_id = message.request_id
        trace = self._telemetry.begin(message)
        ended: EndedRequest | None = None
        try:
            self._refuse_if_draining()
            num_beams = num_streams(message) if message.HasField("beam_search") else 1
            with (
                self._admission.room(identity, identity.priority(message.priority), num_beams),
                self.items.lease(identity) as items,
            ):
                limits.begin_request()
                with self._streams.registry.preparing(identity.scoped_id(request_id), message.resume.attempt):
                    request = await self._prepare(message, seconds, trace, items)
                    del message
                    release()
                    if len(request.prompt_token_ids) > _LONG_PROMPT:
                        await asyncio.sleep(0)
                    choices, backlog = await self._streams.fold(request, self.tokenizer.tokenizer, self._text.outputs)
                    self._refuse_if_draining()
                trace.prepared(request)
                stream = self._streams.make(request, choices, backlog, limits)
                # No await from here to `add`: two requests of one id can't both get through.
                self._streams.registry.admit(request)
                self._streams.dispatcher.place(stream.placement)
                self._streams.registry.add(stream)
                limits.spend_tokens(len(request.prompt_token_ids))
                try:
                    yield stream
                finally:
                    # A client may leave as soon as it has the last message: that is not a cancel.
                    if stream.outbox.is_delivered:
                        outcome = stream.outcome
                    stream.close()
                    ended = stream.ended()
                    self._streams.registry.remove(stream)
        except RequestError as error:
            outcome, failure = error.status.name.lower(), str(error)
            raise
        finally:
            self._telemetry.end(request_id, trace, ended, outcome=outcome, error=failure)

    async def _prepare(
        self, message: pb.GenerateRequest, seconds: float | None, trace: RequestTrace, items: RequestItems
    ) -> Request:
        """Resolves a message, and adds its caller. items: gets those of the request. Raises RequestError."""
        arrival = time.monotonic()
        resolved = await resolve(message, self._model, self._text, items, trace)
        self._refuse_if_draining()
        deadline = None if seconds is None else arrival + seconds
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        identity = caller()
        return Request(
            request_id=message.request_id,
            scoped_id=identity.scoped_id(message.request_id),
            model=resolved.model.name,
            prompt_token_ids=resolved.prompt.token_ids,
            sampling=resolved.sampling,
            arrival=arrival,
            eos_token_ids=list(resolved.model.eos_token_ids),
            priority=identity.priority(message.priority),
            tenant=identity.tenant,
            weight=identity.weight,
            cache_salt=identity.scoped_salt(message.cache_salt),
            session_key=message.session_key,
            deadline=deadline,
            features=resolved.features,
            num_logprobs=resolved.num_logprobs,
            resume=_resume_of(message),
            items=resolved.prompt.spans,
            item_files=tuple(item.packed for item in resolved.prompt.items),
            beam_search=resolved.beam_search,
            parsed_chat=resolved.parsed_chat,
            include_reasoning=resolved.include_reasoning,
            trace=trace,
        )

    async def tokenize(self, message: pb.TokenizeRequest) -> list[int]:
        """Answers a Tokenize, which counts as a request of the caller. Raises RequestError."""
        if message.WhichOneof("input") is None:
            raise InvalidRequest("no input: set prompt or chat")
        if asked_items(message):
            # How many tokens an item has, a replica tells: there must be one.
            _ = self.model
        # Texts are bounded as those of requests are; while no replica has told max_model_len, by the tokens alone.
        max_len, most = self.max_model_len or MAX_TOKENIZED, MAX_TOKENIZED
        identity = caller()
        with self._admission.room(identity, None):
            identity.limits.begin_request()
            with self.items.lease(identity) as items:
                try:
                    return await tokens_of(message, self._model.media_json, self._text, items, max_len, most)
                except TooManyTokensError as error:
                    raise InvalidRequest(f"{error}: send it in parts") from None

    async def detokenize(self, message: pb.DetokenizeRequest) -> str:
        """Answers a Detokenize, which counts as a request of the caller. Raises RequestError."""
        check_detokenized(message.token_ids)
        identity = caller()
        with self._admission.room(identity, None):
            identity.limits.begin_request()
            return await self.tokenizer.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: use another one, or try again once it is back")


def _resume_of(message: pb.GenerateRequest) -> pb.Resume | None:
    if not message.HasField("resume"):
        return None
    # A part of a message keeps all of it, and the stream may last.
    if message.ByteSize() - message.resume.ByteSize() <= _MOST_KEPT_BYTES:
        return message.resume
    resume = pb.Resume()
    resume.CopyFrom(message.resume)
    return resume
