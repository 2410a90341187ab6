"""`inference.GRPCInferenceService`, the protocol of KServe and of Triton's clients (router/compat/protos/kserve.proto).

Requests and answers are tensors of Triton's vLLM backend.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import grpc.aio
from pydantic import ValidationError

from configs.options import Options
from protos import inference_pb2 as octavo
from router.api.gateway.errors import BadRequestError, of_validation
from router.api.gateway.openai.convert import completion_messages
from router.api.gateway.openai.reply import finish_of
from router.api.gateway.openai.schemas import CompletionRequest
from router.api.gateway.reading.parsing import MOST_VALUES_HERE, is_light
from router.api.grpc_errors import grpc_errors, guarded
from router.compat.engines import Context, write_replies
from router.compat.protos import kserve_pb2 as pb
from router.compat.protos.kserve_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from router.errors import InvalidRequest, RequestError, status_of
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.request.values import check_model_name
from router.security.message_memory import release
from router.streams.outbox import bounded_write
from router.streams.stream import Stream
from router.telemetry.call_context import log_fields

log = logging.getLogger("octavo.router.kserve")

# Requests of one streamed call that are under way at once; the next is read when one of them ends.
_MOST_AT_ONCE = 256
_LENGTH_BYTES = 4
OUTPUT = "text_output"
INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
VERSION = "1"
_FINAL = "triton_final_response"
# So much is parsed within milliseconds.
_MAX_PARAMETERS_BYTES = 2**16


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    """Registers the service and returns its full name."""
    add_GRPCInferenceServiceServicer_to_server(KserveService(intake, replicas), server)
    return [pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name]


class KserveService(GRPCInferenceServiceServicer):
    """The served model, with the tensors of Triton's vLLM backend."""

    def __init__(self, intake: Intake, replicas: ReplicaSet) -> None:
        self._intake, self._replicas = intake, replicas

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        served = request.name in ("", self._intake.model_name) and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=served and self._ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="octavo", version=version("octavo"))

    @guarded
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        check_model_name(request.name, self._intake.model_name)
        answer = pb.ModelMetadataResponse(name=self._intake.model_name, versions=[VERSION], platform="octavo")
        for name, datatype in INPUTS.items():
            answer.inputs.add(name=name, datatype=datatype, shape=[1])
        answer.outputs.add(name=OUTPUT, datatype="BYTES", shape=[-1])
        return answer

    @guarded
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        replies, opening = self._asked(request, context)
        # It may be large, and the stream may last.
        del request
        if replies.infer.stream:
            raise InvalidRequest("stream=true: call ModelStreamInfer, or leave it out")
        responses: list[pb.ModelInferResponse] = []

        async def add(response: pb.ModelInferResponse) -> None:
            responses.append(response)

        async with opening as stream:
            await write_replies(stream, replies.take, add)
        (response,) = responses
        return response

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Reports an error that ends one request in its response; the others continue."""
        writing = asyncio.Lock()
        free = asyncio.Semaphore(_MOST_AT_ONCE)

        async def answer(asked: list[pb.ModelInferRequest]) -> None:
            # A request may be large: only this part of it is held while it is answered.
            request_id, model_name = asked[0].id, asked[0].model_name
            try:
                replies, opening = self._asked(asked.pop(), context)
                async with opening as stream:
                    await write_replies(stream, replies.take, send)
            except RequestError as error:
                await tell(request_id, model_name, error)
            except Exception as error:
                log.exception("failed", extra=log_fields(request_id))
                await tell(request_id, model_name, error)
            finally:
                # Refused, or it has ended: the next message of this call may have its share.
                release()
                free.release()

        async def send(response: pb.ModelInferResponse) -> None:
            async with writing:
                await context.write(pb.ModelStreamInferResponse(infer_response=response))

        async def tell(request_id: str, model_name: str, error: Exception) -> None:
            status, message = status_of(error)
            if isinstance(error, RequestError) and error.retry_after_s is not None:
                # The message is the only place for the delay: no status with details is sent.
                message += f" (in {error.retry_after_s:.1f} s)"
            failed = pb.ModelInferResponse(model_name=model_name, id=request_id)
            response = pb.ModelStreamInferResponse(error_message=f"{status.name}: {message}", infer_response=failed)
            async with writing:
                with bounded_write():
                    await context.write(response)

        async with grpc_errors(context):
            unreadable: RequestError | None = None
            async with asyncio.TaskGroup() as group:
                try:
                    async for request in request_iterator:
                        asked = [request]
                        del request
                        await free.acquire()
                        group.create_task(answer(asked))
                        del asked
                except RequestError as error:
                    # A message that could not be taken, so that it has no id: the requests before it continue.
                    unreadable = error
            if unreadable is not None:
                raise unreadable

    @property
    def _ready(self) -> bool:
        return self._replicas.num_ready > 0 and not self._intake.draining

    def _asked(
        self, request: pb.ModelInferRequest, context: Context
    ) -> "tuple[Replies, contextlib.AbstractAsyncContextManager[Stream]]":
        """Raises InvalidRequest."""
        infer, message = read(request, self._intake.model_name)
        return Replies(infer, message), self._intake.open(message, context.time_remaining())


# --- Requests and answers


class Inputs:
    """The inputs of one request, one element each. Refuses unknown ones."""

    def __init__(self, request: pb.ModelInferRequest, known: Mapping[str, str]) -> None:
        """known: datatype by name. Raises InvalidRequest."""
        raw = request.raw_input_contents
        self.is_raw = bool(raw)
        if raw and len(raw) != len(request.inputs):
            raise InvalidRequest(
                f"raw_input_contents has {len(raw)} entries, inputs has {len(request.inputs)}: give as many, or none"
            )
        self._values: dict[str, bytes | bool] = {}
        for i, tensor in enumerate(request.inputs):
            datatype = known.get(tensor.name)
            if datatype is None:
                raise InvalidRequest(f"inputs[{i}].name={tensor.name[:100]!r}: use {', '.join(known)}")
            if tensor.datatype != datatype:
                raise InvalidRequest(f"input {tensor.name}: datatype={tensor.datatype[:20]!r}: use {datatype}")
            if tensor.name in self._values:
                raise InvalidRequest(f"input {tensor.name} comes twice: give each once")
            if any(length != 1 for length in tensor.shape):
                raise InvalidRequest(f"input {tensor.name}: shape={list(tensor.shape)[:8]}: use one element, [1]")
            read = _read_bytes if datatype == "BYTES" else _read_bool
            self._values[tensor.name] = read(tensor.name, raw[i] if raw else None, tensor.contents)

    def text(self, name: str) -> str | None:
        """Returns an input of BYTES as text; None if it is not there. Raises InvalidRequest."""
        value = self.data(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input {name} is not UTF-8 at byte {error.start}") from None

    def data(self, name: str) -> bytes | None:
        """Returns an input of BYTES; None if it is not there."""
        value = self._values.get(name)
        assert not isinstance(value, bool)
        return value

    def flag(self, name: str) -> bool | None:
        """Returns an input of BOOL; None if it is not there."""
        value = self._values.get(name)
        assert not isinstance(value, bytes)
        return value


def add_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str], *, raw: bool) -> None:
    """Adds an output of BYTES. raw: True if the request's inputs were."""
    output = response.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        response.raw_output_contents.append(
            b"".join(len(each).to_bytes(_LENGTH_BYTES, "little") + each for each in elements)
        )
    else:
        output.contents.bytes_contents.extend(elements)


def _read_bytes(name: str, raw: bytes | None, contents: pb.InferTensorContents) -> bytes:
    if raw is None:
        if len(contents.bytes_contents) != 1:
            raise InvalidRequest(f"input {name} has {len(contents.bytes_contents)} bytes_contents: give one")
        return contents.bytes_contents[0]
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if len(raw) != _LENGTH_BYTES + length:
        raise InvalidRequest(f"input {name} has {len(raw)} raw bytes: give the length in 4 bytes, then that many bytes")
    return raw[_LENGTH_BYTES:]


def _read_bool(name: str, raw: bytes | None, contents: pb.InferTensorContents) -> bool:
    if raw is None:
        if len(contents.bool_contents) != 1:
            raise InvalidRequest(f"input {name} has {len(contents.bool_contents)} bool_contents: give one")
        return contents.bool_contents[0]
    if len(raw) != 1:
        raise InvalidRequest(f"input {name} has {len(raw)} raw bytes: a BOOL is one")
    return raw != b"\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """How a request is answered. stream: a response for each piece of text; else one with the text of every choice."""

    model_name: str
    client_id: str
    stream: bool
    prepends_input: bool
    raw: bool

    def response(self, texts: list[str], *, final: bool) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self.model_name, model_version=VERSION, id=self.client_id)
        if self.stream:
            response.parameters[_FINAL].bool_param = final
        add_texts(response, OUTPUT, texts, raw=self.raw)
        return response


class Replies:
    """Folds a stream's events into responses: one for each piece of text, or a last one with all of it."""

    def __init__(self, infer: Infer, message: octavo.GenerateRequest) -> None:
        self.infer = infer
        first = message.prompt if infer.prepends_input else ""
        self._texts = [[first] for _ in range(max(message.sampling.n, 1))]

    def take(self, event: octavo.GenerateResponse) -> list[pb.ModelInferResponse]:
        """Takes in an event. Returns what is to be sent for it. Raises Internal."""
        match event.WhichOneof("event"):
            case "chunk":
                chunk = event.chunk
                final = finish_of(chunk) is not None
                if not self.infer.stream:
                    self._texts[chunk.index].append(chunk.text)
                elif chunk.text or final:
                    return [self.infer.response([chunk.text], final=final)]
            case "finished" if not self.infer.stream:
                return [self.infer.response(list(map("".join, self._texts)), final=True)]
        return []


def read(request: pb.ModelInferRequest, model_name: str) -> tuple[Infer, octavo.GenerateRequest]:
    """Parses a request. model_name: used if the request names none. Raises InvalidRequest."""
    if request.model_version not in ("", VERSION):
        raise InvalidRequest(f"model_version={request.model_version[:100]!r}: use {VERSION!r}, or leave it empty")
    for output in request.outputs:
        if output.name != OUTPUT:
            raise InvalidRequest(f"outputs: {output.name[:100]!r} is unknown: use {OUTPUT}")
    inputs = Inputs(request, INPUTS)
    prompt = inputs.text("text_input")
    if prompt is None:
        raise InvalidRequest("the input text_input is missing")
    stream = bool(inputs.flag("stream"))
    excludes_input = inputs.flag("exclude_input_in_output")
    if stream and excludes_input is False:
        raise InvalidRequest("exclude_input_in_output=false: a stream brings only new text; leave it out")
    message = _message(prompt, _parameters(inputs))
    message.model = request.model_name or model_name
    if stream and message.sampling.n > 1:
        raise InvalidRequest(f"sampling_parameters: n={message.sampling.n} with stream=true: use n=1")
    infer = Infer(
        model_name=message.model,
        client_id=request.id,
        stream=stream,
        # As Triton's backend does, unless it is told otherwise or streams.
        prepends_input=not stream and not excludes_input,
        raw=inputs.is_raw,
    )
    return infer, message


def _parameters(inputs: Inputs) -> dict[str, Any]:
    data = inputs.data("sampling_parameters")
    if not data:
        return {}
    if len(data) > _MAX_PARAMETERS_BYTES:
        raise InvalidRequest(
            f"sampling_parameters has {len(data)} bytes: use at most {_MAX_PARAMETERS_BYTES}; the prompt belongs "
            "into text_input"
        )
    if not is_light(data):
        raise InvalidRequest(
            f"sampling_parameters has more than {MOST_VALUES_HERE} values: use at most that many commas and brackets"
        )
    text = inputs.text("sampling_parameters")
    assert text is not None
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("sampling_parameters is not valid JSON") from None
    if not isinstance(parameters, dict):
        raise InvalidRequest("sampling_parameters is not a JSON object")
    return parameters


def _message(prompt: str, parameters: dict[str, Any]) -> octavo.GenerateRequest:
    """Parameters have vLLM's names, as the HTTP endpoints take them; numbers may be text."""
    for name in ("prompt", "model", "stream", "stream_options", "echo"):
        if name in parameters:
            raise InvalidRequest(f"sampling_parameters: {name} is not a sampling parameter")
    try:
        request = CompletionRequest.model_validate({**parameters, "prompt": prompt})
        # Clients' ids need not be unique.
        [message] = completion_messages(request, uuid.uuid4().hex)
    except ValidationError as error:
        raise InvalidRequest(f"sampling_parameters: {of_validation(error)}") from None
    except BadRequestError as error:
        raise InvalidRequest(f"sampling_parameters: {error}") from None
    if request.max_tokens == 0:
        raise InvalidRequest("sampling_parameters: max_tokens=0: use at least 1")
    return message
