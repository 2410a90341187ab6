"""Opens a stream for a request of any protocol: checks, tokenizes and resolves it, then places it on a replica."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from configs import features
from configs.sampling import MAX_LOGPROBS
from protos import inference_pb2 as pb
from router.errors import (
    DeadlineExceeded,
    Draining,
    InvalidConstraint,
    InvalidRequest,
    NoReplica,
    RequestError,
)
from router.intake import validation
from router.intake.admission import Admission
from router.intake.bans import ban, check_bans
from router.intake.constraints import Constraints, check_constraint, wrong_tool
from router.intake.live import LiveRequests
from router.intake.media.asked import asked_items
from router.intake.media.items import Items
from router.intake.media.store import Held
from router.intake.outputs import Outputs, includes_reasoning
from router.intake.prompts import Prompts
from router.intake.thinking import check_enforced
from router.intake.validation import resolve_logprobs, resolve_sampling
from router.parsing.grammar import enforced_schemas
from router.replicas.dispatcher import Dispatcher
from router.replicas.replica_set import ReplicaSet
from router.replicas.slices import finish_in_slices
from router.request import EndedRequest, Request, RequestTrace
from router.search.checks import check_room, check_search, num_needed, num_streams, resolve_search
from router.search.stream import SearchStream, Turns
from router.security.held import release
from router.security.identity import caller
from router.streams.choices import SLICE_TOKENS, Choice, new_choices, refold
from router.streams.outbox import Outbox, WriteQueue
from router.streams.registry import StreamRegistry
from router.streams.stream import Stream
from router.streams.whole_answers import WholeAnswers
from router.telemetry.metrics import RouterMetrics
from router.telemetry.requests import RequestTelemetry
from router.text.tokenizer import TooManyTokensError
from router.text.tokenizer_pool import TokenizerPool, listed

# Bytes of a message besides the resume that a stream keeps.
_MOST_KEPT_BYTES = 65_536
# To check the tokens of longer prompts, and to copy them into Started, takes 5 ms and more each.
_LONG_PROMPT = 2**18


class Intake:
    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: TokenizerPool,
        constraints: Constraints,
        replicas: ReplicaSet,
        admission: Admission,
        registry: StreamRegistry,
        dispatcher: Dispatcher,
        live: LiveRequests,
        metrics: RouterMetrics,
        telemetry: RequestTelemetry,
        items: Items,
        buffer_bytes: int,
        answers_bytes: int = 2**30,
        trusts_templates: bool = False,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """buffer_bytes, answers_bytes: options stream_buffer_bytes and max_answers_bytes. trusts_templates: option
        trust_request_chat_template.

        tool_call_parser, reasoning_parser: the options. Raises ValueError if they do not go together.
        """
        # `drain` or `stop` has been called.
        self.draining = False
        self.model_name = model_name
        self.tokenizer = tokenizer
        self._constraints = constraints
        self._replicas = replicas
        self._admission = admission
        self._registry = registry
        self._dispatcher = dispatcher
        # Cancels and moves requests.
        self.live = live
        self.metrics = metrics
        self._telemetry = telemetry
        self._buffer_bytes = buffer_bytes
        self.items = items
        # Room for answers that come whole.
        self.answers = WholeAnswers(answers_bytes)
        self._prompts = Prompts(tokenizer, items, trusts_templates=trusts_templates)
        self._outputs = Outputs(tokenizer.tokenizer, tool_call_parser, reasoning_parser)
        self._write_queue = WriteQueue()
        # Large resumes fold a slice each in turn.
        self._refold_turn = asyncio.Lock()
        self._turns = Turns()

    def drain(self) -> None:
        """Refuses new requests, and ends those that no replica computes: another router may have a replica for them."""
        self.draining = True
        self._dispatcher.end_parked(
            Draining("this router is shutting down, and no replica computes this request: resume at another router")
        )

    def stop(self) -> None:
        """Refuses new requests, and ends all live ones, which clients may resume."""
        self.draining = True
        self._registry.fail_all(Draining("this router is shutting down: resume at another one, or once it is back"))

    @property
    def num_streams(self) -> int:
        return len(self._registry)

    @property
    def model(self) -> pb.ModelInfo:
        """The served model. Raises NoReplica."""
        model = self._replicas.model
        if model is None:
            raise NoReplica(f"no replica is ready: {self._replicas.describe()}; try again in a few seconds")
        return model

    @property
    def max_model_len(self) -> int:
        """The served model's max_model_len; 0: not known yet."""
        model = self._replicas.model
        return 0 if model is None else model.max_model_len

    @property
    def takes_items(self) -> bool:
        """True if the served model takes images or videos, as far as is known."""
        return bool(self._replicas.media_json)

    @property
    def max_item_bytes(self) -> int:
        """The most bytes of images and videos that a request may have; 0: it has none."""
        limits = self.items.limits
        return limits.max_request_bytes if limits.takes_items and self.takes_items else 0

    def parses(self, chat: pb.ChatPrompt) -> bool:
        """Tells whether the served model's formats tell more apart in a chat's output than its answer."""
        return self._outputs.are_parsed(chat)

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
            with (
                self._admission.room(identity, identity.priority(message.priority), num_streams(message)),
                self.items.store.holding(identity) as held,
            ):
                limits.begin_request()
                with self._registry.preparing(identity.scoped_id(request_id), message.resume.attempt):
                    request = await self._prepare(message, seconds, trace, held)
                    del message
                    release()
                    if len(request.prompt_token_ids) > _LONG_PROMPT:
                        await asyncio.sleep(0)
                    choices, backlog = await self._fold(request)
                trace.prepared(request)
                outbox = Outbox(self._buffer_bytes, self._write_queue)
                stream = self._stream(request, choices, backlog, outbox)
                # No await from here to `add`: two requests of one id can't both get through.
                self._registry.admit(request)
                self._dispatcher.place(stream.placement)
                self._registry.add(stream)
                limits.spend_tokens(len(request.prompt_token_ids))
                try:
                    yield stream
                finally:
                    # A client may leave as soon as it has the last message: that is not a cancel.
                    if stream.outbox.is_delivered:
                        outcome = stream.outcome
                    stream.close()
                    ended = stream.ended()
                    self._registry.remove(stream)
        except RequestError as error:
            outcome, failure = error.status.name.lower(), str(error)
            raise
        finally:
            self._telemetry.end(request_id, trace, ended, outcome=outcome, error=failure)

    async def _prepare(
        self, message: pb.GenerateRequest, seconds: float | None, trace: RequestTrace, held: Held
    ) -> Request:
        """Validates, tokenizes and resolves. held: gets the request's items. Raises RequestError."""
        arrival = time.monotonic()
        validation.check_model_name(message.model, self.model_name)
        await finish_in_slices(validation.checks_of_request(message))
        check_bans(message.sampling)
        check_constraint(message)
        check_search(message)
        self._outputs.check_size(message)
        model = self.model
        since = time.monotonic()
        prompt = await self._prompts.of_request(message, model, self._replicas.media_json, held)
        prompt_token_ids = prompt.token_ids
        words = message.sampling.bad_words
        bad_words = await self.tokenizer.encode_bad_words(words) if words else ()
        trace.tokenized(since)
        self._refuse_if_draining()
        deadline = None if seconds is None else arrival + seconds
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        if message.suffix and not message.HasField("resume"):
            self._prompts.stop_fill_in(message.sampling)
        validation.check_against_model(prompt_token_ids, message.sampling, model)
        if message.HasField("resume"):
            for i, choice in enumerate(message.resume.choices):
                field = f"resume.choices[{i}].output_token_ids"
                validation.check_token_ids(field, await listed(choice.output_token_ids), model.vocab_size)
                if len(choice.output_token_ids) > SLICE_TOKENS:
                    await asyncio.sleep(0)
        own = pb.Constraint()
        own.CopyFrom(message.sampling.constraint)
        parsed_chat = self._outputs.resolve(message, prompt_token_ids)
        check_enforced(message.sampling, model)
        sampling = resolve_sampling(
            message.sampling,
            model.default_sampling,
            num_prompt_tokens=len(prompt_token_ids),
            max_model_len=model.max_model_len,
        )
        num_logprobs = resolve_logprobs(sampling, model.vocab_size, self._replicas.max_logprobs)
        ban(sampling, bad_words, model)
        if sampling.HasField("constraint"):
            sampling.constraint.CopyFrom(await self._canonical(message, own, model))
            self._refuse_if_draining()
        search = resolve_search(message)
        if search is not None:
            check_room(search, sampling, model)
        needed = features.needed_by(sampling)
        if search is not None and num_needed(search, sampling, model) > MAX_LOGPROBS:
            needed |= {features.WIDE_SEARCH}
        if prompt.spans:
            needed |= {features.ITEMS}
        identity = caller()
        return Request(
            request_id=message.request_id,
            scoped_id=identity.scoped_id(message.request_id),
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            arrival=arrival,
            eos_token_ids=list(model.eos_token_ids),
            priority=identity.priority(message.priority),
            tenant=identity.tenant,
            weight=identity.weight,
            cache_salt=identity.scoped_salt(message.cache_salt),
            session_key=message.session_key,
            deadline=deadline,
            features=needed,
            num_logprobs=num_logprobs,
            resume=_resume_of(message),
            items=prompt.spans,
            item_files=tuple(item.packed for item in prompt.items),
            beam_search=search,
            parsed_chat=parsed_chat,
            include_reasoning=includes_reasoning(message),
            trace=trace,
        )

    async def _canonical(self, message: pb.GenerateRequest, own: pb.Constraint, model: pb.ModelInfo) -> pb.Constraint:
        """Returns the constraint in its canonical form. own: the client's, which may be a part of it. Raises
        InvalidConstraint, InvalidTools, MissingFeature."""
        try:
            return await self._constraints.canonical(message.sampling.constraint, model)
        except InvalidConstraint as error:
            # A resume brings it, whatever it was made from.
            form = self._outputs.form.calls
            schemas = {} if message.HasField("resume") else enforced_schemas(form, message.chat)
            if own.WhichOneof("kind") not in (None, message.sampling.constraint.WhichOneof("kind")):
                await self._constraints.canonical(own, model)
            if not schemas:
                raise
            raise await wrong_tool(self._constraints, schemas, model, error) from None

    def _stream(self, request: Request, choices: list[Choice], backlog: list[pb.Chunk], outbox: Outbox) -> Stream:
        limits, dispatcher = caller().limits, self._dispatcher
        if request.beam_search is None:
            return Stream(request, choices, backlog, dispatcher, self.metrics, outbox, limits)
        return SearchStream(request, choices, backlog, dispatcher, self.metrics, outbox, limits, self._turns)

    async def _fold(self, request: Request) -> tuple[list[Choice], list[pb.Chunk]]:
        """Returns the request's choices, with what a resume brings, and what its client lacks. Raises
        InvalidRequest."""
        parsers = self._outputs.parsers(
            request.parsed_chat,
            request.prompt_token_ids,
            request_id=request.request_id,
            num_choices=request.sampling.n,
            include_reasoning=request.include_reasoning,
        )
        choices = new_choices(request.sampling, request.eos_token_ids, self.tokenizer.tokenizer, parsers)
        if request.resume is None:
            return choices, []
        backlog = await refold(choices, request.resume, request.sampling, self._refold_turn)
        self._refuse_if_draining()
        return choices, backlog

    async def tokenize(self, message: pb.TokenizeRequest) -> list[int]:
        """Answers a Tokenize, which counts as a request of the caller. Raises RequestError."""
        if message.WhichOneof("input") is None:
            raise InvalidRequest("no input: set prompt or chat")
        if asked_items(message):
            # How many tokens an item has, a replica tells: there must be one.
            _ = self.model
        # Texts are bounded as those of requests are; while no replica has told max_model_len, by the tokens alone.
        max_len, most = self.max_model_len or validation.MAX_TOKENIZED, validation.MAX_TOKENIZED
        identity = caller()
        with self._admission.room(identity, None):
            identity.limits.begin_request()
            with self.items.store.holding(identity) as held:
                try:
                    return await self._prompts.of_tokenize(message, self._replicas.media_json, held, max_len, most)
                except TooManyTokensError as error:
                    raise InvalidRequest(f"{error}: send it in parts") from None

    async def detokenize(self, message: pb.DetokenizeRequest) -> str:
        """Answers a Detokenize, which counts as a request of the caller. Raises RequestError."""
        validation.check_detokenized(message.token_ids)
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
