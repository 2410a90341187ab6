"""Converts the tensors of Triton's vLLM backend to the router's own request, and its events to tensors."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from protos import inference_pb2 as octavo
from protos import kserve_pb2 as pb
from router.api.gateway.errors import BadRequestError, of_validation
from router.api.gateway.openai.convert import completion_messages
from router.api.gateway.openai.schemas import CompletionRequest
from router.api.gateway.reading.parsing import MOST_VALUES_HERE, is_light
from router.errors import InvalidRequest

_LENGTH_BYTES = 4


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


OUTPUT = "text_output"
INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
VERSION = "1"
_FINAL = "triton_final_response"
# So much is parsed within milliseconds.
_MAX_PARAMETERS_BYTES = 2**16


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
