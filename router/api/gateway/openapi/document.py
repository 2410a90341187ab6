"""The OpenAPI document of the HTTP API: a table of operations, and pydantic's schemas of their bodies and answers.

It is the same for every cluster of a version: it names no model, and no host.

OpenAPI 3.0.3, not 3.1: the Swagger UI of swagger-ui-bundle does not show newer ones, nor do many generators of clients
read them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from router.api.gateway.anthropic.errors import is_anthropics
from router.api.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.api.gateway.batches.endpoints import BatchRequest
from router.api.gateway.openai.schemas import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from router.api.gateway.openapi import answers as told
from router.api.gateway.responses.schemas import ResponseRequest
from runtime.wire import octavo_version

# Statuses of calls that compute, of those that read what is stored, and of the others.
_COMPUTING, _STORED, _OTHER = (400, 401, 404, 429, 503), (401, 404, 503), (401,)
_ABOUT = """\
Octavo's HTTP API: OpenAI's and Anthropic's clients call it unmodified. A field's description says if it has no effect,
or is refused; null is the same as leaving a field out. A field that is not here is ignored, and the header
X-Octavo-Ignored-Fields of the answer names it."""
# What starlette writes behind a parameter's name.
_CONVERTER = re.compile(r":\w+}")
# How pydantic tells apart models of one name, such as openai.Message and anthropic.Message.
_QUALIFIED = re.compile(rb"\w+__gateway__([a-z]+)__[a-z_]+?__(\w+)")
_REF = "#/components/schemas/{model}"
_NULL = {"type": "string", "enum": [None], "nullable": True}
# A path, its methods, and whether it answers more than that it is not there yet.
Routed = tuple[str, Iterable[str], bool]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation without `answers` answers with text, one without `streams` has no stream.

    takes, answers, streams: types of the body, of a whole answer and of a stream's events. body, media: media types of
    the body, and of text. is_open: no key is needed.
    """

    tag: str
    summary: str
    takes: Any = None
    answers: Any = None
    streams: Any = None
    statuses: tuple[int, ...] = _COMPUTING
    body: str = "application/json"
    media: str = "text/plain"
    is_open: bool = False


_openai, _anthropic = partial(Operation, "OpenAI's API"), partial(Operation, "Anthropic's API")
_tokens, _server = partial(Operation, "Tokens"), partial(Operation, "Server", statuses=_OTHER)
_stored = partial(_openai, statuses=_STORED)
_NOT_YET = _server("Needs a model that is not served yet", statuses=(404,))
_UPLOAD = create_model("FileUpload", file=bytes, purpose=str)
_CHAT_OR_TEXT = "Answers a chat if the body has messages, else completes text (SageMaker)"
_GO_ON = "Goes on with a stream whose request had detach_timeout, behind the event that Last-Event-ID names"
_CHATS = "Answers several chats, as in vLLM"

OPERATIONS: dict[str, Operation] = {
    "post /v1/completions": _openai("Completes text", CompletionRequest, told.Completion, told.Completion),
    "post /v1/chat/completions": _openai(
        "Answers a chat", ChatCompletionRequest, told.ChatCompletion, told.ChatCompletionChunk
    ),
    "post /v1/chat/completions/batch": _openai(_CHATS, BatchChatRequest, told.ChatCompletion),
    "post /invocations": _openai(
        _CHAT_OR_TEXT,
        ChatCompletionRequest | CompletionRequest,
        told.ChatCompletion | told.Completion,
        told.ChatCompletionChunk | told.Completion,
    ),
    "post /v1/responses": _openai(
        "Answers with a response that can be continued", ResponseRequest, told.Response, told.TypedEvent
    ),
    "get /v1/responses/{response_id}": _stored("A stored response", answers=told.Response),
    "delete /v1/responses/{response_id}": _stored("Deletes a stored response", answers=told.Deleted),
    "post /v1/files": _openai(
        "Stores a file of requests", _UPLOAD, told.File, statuses=(*_COMPUTING, 413), body="multipart/form-data"
    ),
    "get /v1/files": _openai("The caller's files", answers=told.Files),
    "get /v1/files/{file_id}": _stored("A file", answers=told.File),
    "delete /v1/files/{file_id}": _stored("Deletes a file", answers=told.Deleted),
    "get /v1/files/{file_id}/content": _stored("A file's content", media="application/octet-stream"),
    "post /v1/batches": _openai("Computes a file of requests", BatchRequest, told.Batch, statuses=(*_COMPUTING, 413)),
    "get /v1/batches": _openai("The caller's batches", answers=told.Batches),
    "get /v1/batches/{batch_id}": _stored("A batch", answers=told.Batch),
    "post /v1/batches/{batch_id}/cancel": _stored("Cancels a batch", answers=told.Batch, statuses=(*_STORED, 409)),
    "get /v1/models": _stored("The served model", answers=told.Models, statuses=(401, 503)),
    "get /v1/models/{model}": _stored("A model by its name", answers=told.Model),
    "post /v1/messages": _anthropic("Answers a chat", MessagesRequest, told.AnthropicMessage, told.TypedEvent),
    "post /v1/messages/count_tokens": _anthropic(
        "Counts the tokens of a chat", CountTokensRequest, create_model("TokenCount", input_tokens=int)
    ),
    "post /tokenize": _tokens("The tokens of a text or a chat", TokenizeRequest | TokenizeChatRequest, told.Tokens),
    "post /detokenize": _tokens("The text of tokens", DetokenizeRequest, create_model("Text", prompt=str)),
    "get /v1/streams/{request_id}": _server(_GO_ON, statuses=(400, 401, 404), media="text/event-stream"),
    "delete /v1/streams/{request_id}": _server("Ends such a stream", answers=told.Deleted, statuses=(400, 401, 404)),
    "get /version": _server("Octavo's version", answers=create_model("Version", version=str)),
    "get /load": _server(
        "The number of live streams of this router process", answers=create_model("Load", server_load=int)
    ),
    "get /health": _server("Tells if requests are served", statuses=(503,), is_open=True),
    "get /ping": _server("The same as /health", statuses=(401, 503)),
    "post /ping": _server("The same as /health", statuses=(401, 503)),
    "get /metrics": _server("Metrics for Prometheus, with an admin's key", statuses=(401, 403)),
    "get /openapi.json": _server("This document", answers=dict[str, Any], statuses=(), is_open=True),
    "get /docs": _server("This document as a page", statuses=(404,), media="text/html", is_open=True),
    "get /console": _server("A page for chats and operators", statuses=(), media="text/html", is_open=True),
}


class _OpenApiSchema(GenerateJsonSchema):
    """Writes schemas as OpenAPI 3.0 does, which differs from the JSON Schema of 2020."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner: Any = schema["schema"]
        if schema.get("default", ...) is not None:
            return super().default_schema(schema)
        # null is the same as no field.
        return self.generate_inner(inner["schema"] if inner["type"] == "nullable" else inner)

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        made = self.generate_inner(schema["schema"])
        if "type" not in made:
            return self.get_union_of_schemas([made, _NULL])
        values = {"enum": [*made["enum"], None]} if "enum" in made else {}
        return {**made, **values, "nullable": True}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        made = super().literal_schema(schema)
        if "const" in made:
            made["enum"] = [made.pop("const")]
        return made

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        # Unknown fields are ignored, unless the option strict_fields refuses them.
        unsaid = ("additionalProperties", "title")
        return {key: value for key, value in super().model_schema(schema).items() if key not in unsaid}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def update_with_validations(self, json_schema: JsonSchemaValue, core_schema: Any, mapping: dict[str, str]) -> None:
        super().update_with_validations(json_schema, core_schema, mapping)
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if exclusive in json_schema:
                # A number in 2020, a flag beside the bound here.
                json_schema |= {bound: json_schema[exclusive], exclusive: True}

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        made = super().generate_inner(schema)
        if "$ref" in made and len(made) > 1:
            # OpenAPI 3.0 ignores all keys beside a reference.
            return {"allOf": [{"$ref": made.pop("$ref")}], **made}
        return made


def document(routes: Iterable[Routed]) -> bytes:
    """Returns the document as JSON. Takes 0.1 s. Raises KeyError for a route that is not in the table."""
    bodies = (each for one in OPERATIONS.values() for each in (one.takes, one.answers, one.streams))
    types = dict.fromkeys([told.Error, told.AnthropicError, *(each for each in bodies if each is not None)])
    adapters: Any = [(each, "validation", TypeAdapter(each)) for each in types]
    found, whole = TypeAdapter.json_schemas(adapters, ref_template=_REF, schema_generator=_OpenApiSchema)
    schemas = {each: schema for (each, _), schema in found.items()}
    paths: dict[str, dict[str, Any]] = {}
    for path, methods, is_served in routes:
        shown = _CONVERTER.sub("}", path)
        for method in sorted({*map(str.lower, methods)} - {"head"}):
            operation = OPERATIONS[f"{method} {shown}"] if is_served else _NOT_YET
            paths.setdefault(shown, {})[method] = _described(method, shown, operation, schemas)
    made = {
        "openapi": "3.0.3",
        "info": {
            "title": "Octavo",
            "version": octavo_version(),
            "description": _ABOUT.replace("\n", " "),
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        # The host that served the document.
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {
            "schemas": whole["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A key where the router has api_keys_file.
        "security": [{}, {"key": []}],
    }
    return _QUALIFIED.sub(rb"\1.\2", msgspec.json.encode(made))


def _described(method: str, path: str, operation: Operation, schemas: dict[Any, JsonSchemaValue]) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": schemas[told.AnthropicError if is_anthropics(path) else told.Error]}}
    answer = {operation.media: text}
    if operation.answers is not None:
        answer = {"application/json": {"schema": schemas[operation.answers]}}
    if operation.streams is not None:
        # Each event's data, with `stream`.
        answer["text/event-stream"] = {"schema": schemas[operation.streams]}
    described = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").rstrip("_"),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {} if operation is _NOT_YET else {"200": {"description": "The answer", "content": answer}},
    }
    for status in operation.statuses:
        is_text = operation.answers is None and status == HTTPStatus.SERVICE_UNAVAILABLE
        content = {"text/plain": text} if is_text else error
        described["responses"][str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [{"name": name, "in": "path", "required": True, **text} for name in names]
    if operation.takes is not None:
        content = {operation.body: {"schema": schemas[operation.takes]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described
