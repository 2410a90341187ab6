"""From the tensors of Triton's vLLM backend to the router's own request, and from its events to theirs."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from protos import inference_pb2 as octavo
from protos import kserve_pb2 as pb
from router.compat.kserve.tensors import Inputs, add_texts
from router.errors import InvalidRequest
from router.gateway.convert import completion_messages
from router.gateway.errors import BadRequestError, of_validation
from router.gateway.schemas import CompletionRequest

OUTPUT = "text_output"
INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
VERSION = "1"
_FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """One request, read. stream: a response for each piece of text; else one with the text of every choice."""

    message: octavo.GenerateRequest
    client_id: str
    stream: bool
    prepends_input: bool
    raw: bool

    def response(self, texts: list[str], *, final: bool) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self.message.model, model_version=VERSION, id=self.client_id)
        if self.stream:
            response.parameters[_FINAL].bool_param = final
        add_texts(response, OUTPUT, texts, raw=self.raw)
        return response


def read(request: pb.ModelInferRequest, model_name: str) -> Infer:
    """model_name: what an empty one means. Raises InvalidRequest."""
    if request.model_version not in ("", VERSION):
        raise InvalidRequest(f"model_version={request.model_version[:100]!r}: use {VERSION!r}, or leave it empty")
    for output in request.outputs:
        if output.name != OUTPUT:
            raise InvalidRequest(f"outputs: {output.name[:100]!r} is not there: use {OUTPUT}")
    inputs = Inputs(request, INPUTS)
    prompt = inputs.text("text_input")
    if prompt is None:
        raise InvalidRequest("the input text_input is missing")
    stream = bool(inputs.flag("stream"))
    excludes_input = inputs.flag("exclude_input_in_output")
    if stream and excludes_input is False:
        raise InvalidRequest("exclude_input_in_output=false: pieces of a stream are only what is new; leave it out")
    message = _message(prompt, _parameters(inputs.text("sampling_parameters")))
    message.model = request.model_name or model_name
    if stream and message.sampling.n > 1:
        raise InvalidRequest(f"sampling_parameters: n={message.sampling.n} with stream=true: use n=1")
    return Infer(
        message=message,
        client_id=request.id,
        stream=stream,
        # Triton's backend does so unless it is told otherwise, or streams.
        prepends_input=not stream and not excludes_input,
        raw=inputs.is_raw,
    )


def _parameters(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("sampling_parameters is no JSON") from None
    if not isinstance(parameters, dict):
        raise InvalidRequest("sampling_parameters is no JSON object")
    return parameters


def _message(prompt: str, parameters: dict[str, Any]) -> octavo.GenerateRequest:
    """Parameters have vLLM's names, as the HTTP endpoints take them; numbers may be text."""
    for name in ("prompt", "model", "stream", "stream_options", "echo"):
        if name in parameters:
            raise InvalidRequest(f"sampling_parameters: {name} is none of them")
    try:
        request = CompletionRequest.model_validate({**parameters, "prompt": prompt})
        # Ids of clients need not be unique.
        [message] = completion_messages(request, uuid.uuid4().hex)
    except ValidationError as error:
        raise InvalidRequest(f"sampling_parameters: {of_validation(error)}") from None
    except BadRequestError as error:
        raise InvalidRequest(f"sampling_parameters: {error}") from None
    return message
