"""Opens a stream for a request of any protocol: checks, tokenizes and resolves it, then has a replica compute it."""

import contextlib
import time
from collections.abc import AsyncIterator

from protos import inference_pb2 as pb
from router.errors import DeadlineExceeded, Draining, InvalidRequest, NoReplica, RequestError, UnknownRequest
from router.intake import validation
from router.intake.admission import Admission
from router.intake.validation import resolve_sampling
from router.replicas.broadcast import broadcast_cancel
from router.replicas.dispatcher import Dispatcher
from router.replicas.migrations import Migration, Migrations
from router.replicas.replica_set import ReplicaSet
from router.request import EndedRequest, Request, RequestTrace
from router.security.identity import caller
from router.streams.outbox import Outbox, WriteQueue
from router.streams.registry import StreamRegistry
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from router.telemetry.requests import RequestTelemetry
from router.text.chat_template import TemplateError
from router.text.tokenizer import TokenizerPool


class Intake:
    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: TokenizerPool,
        replicas: ReplicaSet,
        admission: Admission,
        registry: StreamRegistry,
        dispatcher: Dispatcher,
        migrations: Migrations,
        metrics: RouterMetrics,
        telemetry: RequestTelemetry,
        buffer_bytes: int,
    ) -> None:
        """buffer_bytes: option stream_buffer_bytes."""
        # `drain` or `stop` has been called.
        self.draining = False
        self.model_name = model_name
        self.tokenizer = tokenizer
        self._replicas = replicas
        self._admission = admission
        self._registry = registry
        self._dispatcher = dispatcher
        self._migrations = migrations
        self._metrics = metrics
        self._telemetry = telemetry
        self._buffer_bytes = buffer_bytes
        self._write_queue = WriteQueue()

    def drain(self) -> None:
        """Refuses new requests, and ends those that no replica computes: others may have one for them."""
        self.draining = True
        self._dispatcher.end_parked(
            Draining("this router is shutting down, and no replica goes on with this request: resume at another router")
        )

    def stop(self) -> None:
        """Refuses new requests, and ends all others, resumable."""
        self.draining = True
        self._registry.fail_all(Draining("this router is shutting down: resume at another one, or once it is back"))

    @property
    def num_streams(self) -> int:
        return len(self._registry)

    @property
    def model(self) -> pb.ModelInfo:
        """Raises NoReplica."""
        model = self._replicas.model
        if model is None:
            raise NoReplica(f"no replica is ready: {self._replicas.describe()}; try again in a few seconds")
        return model

    @property
    def max_model_len(self) -> int:
        """0: not known yet."""
        model = self._replicas.model
        return 0 if model is None else model.max_model_len

    async def cancel(self, request_id: str) -> bool:
        """Ends a live request of the caller, at any router; False if none has this id.

        Of other routers it finds the streams that a replica has, not those that wait for one. Raises NoReplica if the
        request is not known here and no replica answers.
        """
        scoped_id = caller().scoped_id(request_id)
        return self._registry.cancel(scoped_id) or await broadcast_cancel(self._replicas.replicas, scoped_id)

    def migrate(self, request_id: str, address: str) -> Migration:
        """Moves a live stream of the caller. address: where to, as scheduler_addresses has it; empty: where the policy
        says.

        Raises UnknownRequest, InvalidRequest if there is no such replica, NotMigrated if none can take it exactly.
        """
        stream = self._registry.find(caller().scoped_id(request_id))
        if stream is None:
            raise UnknownRequest(f"request_id={request_id!r} is not live at this router: ask the one that streams it")
        return self._migrations.migrate(stream.placement, address)

    @contextlib.asynccontextmanager
    async def open(self, message: pb.GenerateRequest, seconds: float | None) -> AsyncIterator[Stream]:
        """A stream for as long as its client's call lasts; whatever ends that frees what the stream holds.

        It is the caller's (security.identity.caller), and counts for the limits of the caller's key.

        message: with a request_id. seconds: until the client's deadline, if it has one. Raises RequestError.
        """
        outcome, failure = "cancelled", ""  # by the client or its deadline, unless something else comes first
        identity = caller()
        limits = identity.limits
        trace = self._telemetry.begin(message)
        ended: EndedRequest | None = None
        try:
            self._refuse_if_draining()
            with self._admission.room(identity.priority(message.priority)):
                limits.begin_request()
                request = await self._prepare(message, seconds, trace)
                trace.prepared(request)
                outbox = Outbox(self._buffer_bytes, self._write_queue)
                stream = Stream(request, self.tokenizer.tokenizer, self._dispatcher, self._metrics, outbox)
                # No await from here to `add`: two requests of one id can't both get through.
                self._registry.admit(request)
                self._dispatcher.place(stream.placement)
                self._registry.add(stream)
                limits.spend_tokens(len(request.prompt_token_ids))
                num_brought = stream.num_output_tokens
                try:
                    yield stream
                finally:
                    # A client may go as soon as it has the last message: that is no cancel.
                    if stream.outbox.is_delivered:
                        outcome = stream.outcome
                    stream.close()
                    ended = stream.ended()
                    self._registry.remove(stream)
                    limits.spend_tokens(stream.num_output_tokens - num_brought)
        except RequestError as error:
            outcome, failure = error.status.name.lower(), str(error)
            raise
        finally:
            self._telemetry.end(message.request_id, trace, ended, outcome=outcome, error=failure)

    async def _prepare(self, message: pb.GenerateRequest, seconds: float | None, trace: RequestTrace) -> Request:
        """Validates, tokenizes and resolves. Raises RequestError."""
        arrival = time.monotonic()
        validation.check_model_name(message.model, self.model_name)
        validation.check_request(message)
        model = self.model
        since = time.monotonic()
        prompt_token_ids = await self._prompt(message, model)
        trace.tokenized(since)
        self._refuse_if_draining()
        deadline = None if seconds is None else arrival + seconds
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed while the prompt was tokenized")
        validation.check_against_model(prompt_token_ids, message.sampling, model)
        if message.HasField("resume"):
            for i, choice in enumerate(message.resume.choices):
                field = f"resume.choices[{i}].output_token_ids"
                validation.check_token_ids(field, choice.output_token_ids, model.vocab_size)
        sampling = resolve_sampling(
            message.sampling,
            model.default_sampling,
            num_prompt_tokens=len(prompt_token_ids),
            max_model_len=model.max_model_len,
        )
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
            cache_salt=identity.scoped_salt(message.cache_salt),
            session_key=message.session_key,
            deadline=deadline,
            resume=message.resume if message.HasField("resume") else None,
            trace=trace,
        )

    async def _prompt(self, message: pb.GenerateRequest, model: pb.ModelInfo) -> list[int]:
        if message.HasField("resume"):
            validation.check_prompt_length(len(message.resume.prompt_token_ids), model)
            return list(message.resume.prompt_token_ids)
        kind = message.WhichOneof("input")
        if kind == "token_ids":
            validation.check_prompt_length(len(message.token_ids.ids), model)
            return list(message.token_ids.ids)
        longest_token = self.tokenizer.tokenizer.longest_token
        if kind == "chat":
            validation.check_chat_length(message.chat, longest_token, model.max_model_len)
            return await self.encode_chat(message.chat)
        validation.check_text_length(message.prompt, longest_token, model.max_model_len)
        return await self.tokenizer.encode(message.prompt)

    async def encode_chat(self, chat: pb.ChatPrompt) -> list[int]:
        """Raises InvalidRequest."""
        validation.check_chat(chat)
        try:
            return await self.tokenizer.encode_chat(chat)
        except TemplateError as error:
            raise InvalidRequest(f"chat: {error}") from None

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: use another one, or try again once it is back")
