"""The Inference service: from a client's message to a stream, and from a stream's events to the client."""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator

import grpc.aio

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceServicer
from router import validation
from router.chat_template import TemplateError
from router.dispatcher import Dispatcher
from router.errors import Draining, InvalidRequest, NoReplica, RequestError, status_of
from router.live import LiveStreams
from router.metrics import RouterMetrics
from router.replicas import ReplicaSet
from router.request import Request
from router.sampling import resolve_sampling
from router.streams import Stream
from router.tokenizer import TokenizerPool

log = logging.getLogger("octavo.router.service")

Context = grpc.aio.ServicerContext


class InferenceService(InferenceServicer):
    """One code path for both calls: GenerateUnary collects what Generate streams."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: TokenizerPool,
        replicas: ReplicaSet,
        metrics: RouterMetrics,
        buffer_bytes: int,
    ) -> None:
        """buffer_bytes: option stream_buffer_bytes."""
        self.draining = False
        self.live = LiveStreams(metrics)
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._replicas = replicas
        self._dispatcher = Dispatcher(replicas, metrics)
        self._metrics = metrics
        self._buffer_bytes = buffer_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        request.request_id = request.request_id or uuid.uuid4().hex
        async with self._answering(context, request.request_id), self._open(request, context) as stream:
            while events := await stream.outbox.take():
                for event in events:
                    await context.write(event)

    async def GenerateUnary(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResult:
        request.request_id = request.request_id or uuid.uuid4().hex
        result = pb.GenerateResult()
        async with self._answering(context, request.request_id), self._open(request, context) as stream:
            result.choices.extend(pb.Choice(index=i, exact=True) for i in range(stream.request.sampling.n))
            while events := await stream.outbox.take():
                for event in events:
                    _collect(result, event)
        return result

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._answering(context):
            validation.check_model_name(request.model, self._model_name)
            kind = request.WhichOneof("input")
            if kind is None:
                raise InvalidRequest("no input: set prompt or chat")
            model = self._replicas.model
            if kind == "chat":
                token_ids = await self._encode_chat(request.chat)
            else:
                token_ids = await self._tokenizer.encode(request.prompt)
            return pb.TokenizeResponse(token_ids=token_ids, max_model_len=0 if model is None else model.max_model_len)
        raise AssertionError("unreachable")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with self._answering(context):
            validation.check_model_name(request.model, self._model_name)
            text = await self._tokenizer.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
            return pb.DetokenizeResponse(text=text)
        raise AssertionError("unreachable")

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.ModelInfo:
        async with self._answering(context):
            validation.check_model_name(request.model, self._model_name)
            return self._require_model()
        raise AssertionError("unreachable")

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        return pb.CancelResponse(cancelled=self.live.cancel(request.request_id))

    @contextlib.asynccontextmanager
    async def _answering(self, context: Context, request_id: str = "") -> AsyncIterator[None]:
        """Ends the call with the status of what is raised inside."""
        try:
            yield
        except RequestError as error:
            log.debug("ended: %s", error, extra={"request_id": request_id})
            await context.abort(*status_of(error))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("failed", extra={"request_id": request_id})
            await context.abort(*status_of(error))

    @contextlib.asynccontextmanager
    async def _open(self, message: pb.GenerateRequest, context: Context) -> AsyncIterator[Stream]:
        """A stream for as long as its client's call lasts; whatever ends that frees what the stream holds."""
        outcome = "cancelled"  # by the client or its deadline, unless something else comes first
        try:
            request = await self._prepare(message, context)
            stream = Stream(request, self._tokenizer.tokenizer, self._dispatcher, self._metrics, self._buffer_bytes)
            # No await from here to `add`: two requests of one id can't both get through.
            self.live.admit(request)
            self._dispatcher.place(stream)
            self.live.add(stream)
            try:
                yield stream
                outcome = stream.outcome
            finally:
                stream.close()
                self.live.remove(stream)
        except RequestError as error:
            outcome = error.status.name.lower()
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()

    async def _prepare(self, message: pb.GenerateRequest, context: Context) -> Request:
        """Validates, tokenizes and resolves. Raises RequestError."""
        arrival = time.monotonic()
        remaining = context.time_remaining()
        self._refuse_if_draining()
        validation.check_model_name(message.model, self._model_name)
        validation.check_request(message)
        model = self._require_model()
        prompt_token_ids = await self._prompt(message, model)
        self._refuse_if_draining()
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
        return Request(
            request_id=message.request_id,
            model=model.name,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            arrival=arrival,
            eos_token_ids=list(model.eos_token_ids),
            priority=message.priority,
            cache_salt=message.cache_salt,
            session_key=message.session_key,
            deadline=None if remaining is None else arrival + remaining,
            resume=message.resume if message.HasField("resume") else None,
        )

    async def _prompt(self, message: pb.GenerateRequest, model: pb.ModelInfo) -> list[int]:
        if message.HasField("resume"):
            return list(message.resume.prompt_token_ids)
        kind = message.WhichOneof("input")
        if kind == "token_ids":
            return list(message.token_ids.ids)
        longest_token = self._tokenizer.tokenizer.longest_token
        if kind == "chat":
            for entry in message.chat.messages:
                validation.check_text_length(entry.content, longest_token, model.max_model_len)
            return await self._encode_chat(message.chat)
        validation.check_text_length(message.prompt, longest_token, model.max_model_len)
        return await self._tokenizer.encode(message.prompt)

    async def _encode_chat(self, chat: pb.ChatPrompt) -> list[int]:
        validation.check_chat(chat)
        try:
            return await self._tokenizer.encode_chat(chat)
        except TemplateError as error:
            raise InvalidRequest(f"chat: {error}") from None

    def _require_model(self) -> pb.ModelInfo:
        model = self._replicas.model
        if model is None:
            raise NoReplica(f"no replica is ready: {self._replicas.describe()}; try again in a few seconds")
        return model

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining("this router is shutting down: use another one, or try again once it is back")


def _collect(result: pb.GenerateResult, event: pb.GenerateResponse) -> None:
    kind = event.WhichOneof("event")
    if kind == "started":
        result.started.CopyFrom(event.started)
    elif kind == "prompt_logprobs":
        result.prompt_logprobs.extend(event.prompt_logprobs.logprobs)
    elif kind == "finished":
        result.usage.CopyFrom(event.finished.usage)
    else:
        chunk = event.chunk
        choice = result.choices[chunk.index]
        choice.text += chunk.text
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(chunk.logprobs)
        choice.exact = chunk.exact
        if chunk.HasField("finish"):
            choice.finish.CopyFrom(chunk.finish)
