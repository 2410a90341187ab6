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
    UnknownRequest,
)
from router.intake import validation
from router.intake.admission import Admission
from router.intake.bans import ban, check_bans
from router.intake.constraints import Constraints, check_constraint
from router.intake.outputs import Outputs, includes_reasoning
from router.intake.thinking import check_enforced
from router.intake.tool_schemas import wrong_tool
from router.intake.validation import resolve_logprobs, resolve_sampling, truncated
from router.parsing.grammar import enforced_schemas
from router.replicas.broadcast import broadcast_cancel
from router.replicas.dispatcher import Dispatcher
from router.replicas.migrations import Migration, Migrations
from router.replicas.replica_set import ReplicaSet
from router.request import EndedRequest, Request, RequestTrace
from router.search.checks import check_room, check_search, num_needed, num_streams, resolve_search
from router.search.stream import SearchStream, Turns
from router.security.held import release
from router.security.identity import caller
from router.streams.choices import SLICE_TOKENS, Choice, new_choices, refold
from router.streams.outbox import Outbox, WriteQueue
from router.streams.registry import StreamRegistry
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from router.telemetry.requests import RequestTelemetry
from router.text.chat_template import TemplateError
from router.text.tokenizer import TooManyTokensError
from router.text.tokenizer_pool import TokenizerPool

_WithText = pb.GenerateRequest | pb.TokenizeRequest


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
        migrations: Migrations,
        metrics: RouterMetrics,
        telemetry: RequestTelemetry,
        buffer_bytes: int,
        trusts_templates: bool = False,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        """buffer_bytes: option stream_buffer_bytes. trusts_templates: option trust_request_chat_template.

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
        self._migrations = migrations
        self.metrics = metrics
        self._telemetry = telemetry
        self._buffer_bytes = buffer_bytes
        self._trusts_templates = trusts_templates
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

    def parses(self, chat: pb.ChatPrompt) -> bool:
        """Tells whether the served model's formats tell more apart in a chat's output than its answer."""
        return self._outputs.are_parsed(chat)

    async def cancel(self, request_id: str) -> bool:
        """Ends a live request of the caller, at any router; False if none has this id.

        At other routers it finds streams that a replica has, not those that wait for one. Raises NoReplica if the
        request is not known here and no replica answers.
        """
        scoped_id = caller().scoped_id(request_id)
        return self._registry.cancel(scoped_id) or await broadcast_cancel(self._replicas.replicas, scoped_id)

    def migrate(self, request_id: str, address: str) -> Migration:
        """Moves a live stream of the caller. address: the target, as in scheduler_addresses; empty: the policy chooses.

        Raises UnknownRequest, InvalidRequest if there is no such replica, NotMigrated if none can continue it exactly.
        """
        stream = self._registry.find(caller().named_id(request_id))
        if stream is None:
            raise UnknownRequest(f"request_id={request_id!r} is not live at this router: ask the one that streams it")
        return self._migrations.migrate(stream.placement, address)

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
            with self._admission.room(identity, identity.priority(message.priority), num_streams(message)):
                limits.begin_request()
                request = await self._prepare(message, seconds, trace)
                del message
                release()
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

    async def _prepare(self, message: pb.GenerateRequest, seconds: float | None, trace: RequestTrace) -> Request:
        """Validates, tokenizes and resolves. Raises RequestError."""
        arrival = time.monotonic()
        validation.check_model_name(message.model, self.model_name)
        validation.check_request(message)
        check_bans(message.sampling)
        check_constraint(message)
        check_search(message)
        self._outputs.check_size(message)
        model = self.model
        since = time.monotonic()
        prompt_token_ids = await self._prompt(message, model)
        words = message.sampling.bad_words
        bad_words = await self.tokenizer.encode_bad_words(words) if words else ()
        trace.tokenized(since)
        self._refuse_if_draining()
        deadline = None if seconds is None else arrival + seconds
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        if message.suffix and not message.HasField("resume"):
            self._stop_fill_in(message.sampling)
        validation.check_against_model(prompt_token_ids, message.sampling, model)
        if message.HasField("resume"):
            for i, choice in enumerate(message.resume.choices):
                field = f"resume.choices[{i}].output_token_ids"
                validation.check_token_ids(field, choice.output_token_ids, model.vocab_size)
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
            resume=message.resume if message.HasField("resume") else None,
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

    async def _prompt(self, message: pb.GenerateRequest, model: pb.ModelInfo) -> list[int]:
        if message.HasField("resume"):
            validation.check_prompt_length(len(message.resume.prompt_token_ids), model)
            return list(message.resume.prompt_token_ids)
        if not message.HasField("truncate_prompt_tokens"):
            return await self._whole_prompt(message, model, model.max_model_len)
        try:
            token_ids = await self._whole_prompt(message, model, validation.MAX_TOKENIZED)
        except TooManyTokensError as error:
            raise InvalidRequest(f"{error}: shorten it before it is truncated") from None
        return truncated(token_ids, message, model.max_model_len)

    async def _whole_prompt(self, message: pb.GenerateRequest, model: pb.ModelInfo, most_tokens: int) -> list[int]:
        """Raises RequestError, and TooManyTokensError for more than most_tokens that the model could take."""
        kind = message.WhichOneof("input")
        if kind == "token_ids":
            num_tokens = len(message.token_ids.ids)
            if num_tokens > most_tokens:
                validation.check_prompt_length(num_tokens, model)
            return list(message.token_ids.ids)
        try:
            if kind == "chat":
                return await self._encode_chat(message.chat, message, model.max_model_len, most_tokens)
            if message.suffix:
                return await self._encode_fill_in(message, model.max_model_len, most_tokens)
            return await self._encode(message.prompt, message, model.max_model_len, most_tokens)
        except TooManyTokensError as error:
            if not message.HasField("truncate_prompt_tokens"):
                validation.check_prompt_length(error.num_tokens, model)
            raise

    async def tokenize(self, message: pb.TokenizeRequest) -> list[int]:
        """Answers a Tokenize, which counts as a request of the caller. Raises RequestError."""
        kind = message.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("no input: set prompt or chat")
        # Texts are bounded as those of requests are; while no replica has told max_model_len, by the tokens alone.
        max_len, most = self.max_model_len or validation.MAX_TOKENIZED, validation.MAX_TOKENIZED
        identity = caller()
        with self._admission.room(identity, None):
            identity.limits.begin_request()
            try:
                if kind == "chat":
                    validation.check_chat(message.chat)
                    return await self._encode_chat(message.chat, message, max_len, most)
                return await self._encode(message.prompt, message, max_len, most)
            except TooManyTokensError as error:
                raise InvalidRequest(f"{error}: send it in parts") from None

    async def detokenize(self, message: pb.DetokenizeRequest) -> str:
        """Answers a Detokenize, which counts as a request of the caller. Raises RequestError."""
        validation.check_detokenized(message.token_ids)
        identity = caller()
        with self._admission.room(identity, None):
            identity.limits.begin_request()
            return await self.tokenizer.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)

    async def _encode(self, text: str, asked: _WithText, max_model_len: int, most_tokens: int) -> list[int]:
        """Raises RequestError or TooManyTokensError."""
        validation.check_text_length(text, self.tokenizer.tokenizer.longest_token, max_model_len)
        with_special = asked.add_special_tokens if asked.HasField("add_special_tokens") else True
        return await self.tokenizer.encode(text, most_tokens, add_special_tokens=with_special)

    async def _encode_fill_in(self, message: pb.GenerateRequest, max_model_len: int, most_tokens: int) -> list[int]:
        """Encodes a prompt with a suffix. Raises RequestError or TooManyTokensError."""
        prefix, suffix, tokenizer = message.prompt, message.suffix, self.tokenizer.tokenizer
        if tokenizer.fill_in is None:
            raise InvalidRequest(
                f"suffix has {len(suffix)} characters, but this model's tokenizer has no tokens for filling in the "
                "middle: leave it out"
            )
        validation.check_text_length(prefix + suffix, tokenizer.longest_token, max_model_len)
        with_special = message.add_special_tokens if message.HasField("add_special_tokens") else True
        return await self.tokenizer.encode_fill_in(prefix, suffix, most_tokens, add_special_tokens=with_special)

    def _stop_fill_in(self, sampling: pb.SamplingParams) -> None:
        """Adds the tokens that end a filled middle. Raises InvalidRequest."""
        fill_in = self.tokenizer.tokenizer.fill_in
        assert fill_in is not None
        stops = [token_id for token_id in fill_in.stop_token_ids if token_id not in sampling.stop_token_ids]
        sampling.stop_token_ids.extend(stops)
        validation.check_stop_tokens(sampling)

    async def _encode_chat(
        self, chat: pb.ChatPrompt, asked: _WithText, max_model_len: int, most_tokens: int
    ) -> list[int]:
        """Renders and encodes a chat that `check_chat` has accepted. Raises RequestError or TooManyTokensError."""
        validation.check_chat_template(chat.chat_template, is_trusted=self._trusts_templates)
        validation.check_chat_length(chat, self.tokenizer.tokenizer.longest_token, max_model_len)
        try:
            return await self.tokenizer.encode_chat(chat, most_tokens, add_special_tokens=asked.add_special_tokens)
        except TemplateError as error:
            raise InvalidRequest(f"chat: {error}") from None

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: use another one, or try again once it is back")
