"""The HTTP operations, with what they take and answer. Routes that are not here are in the document by their path."""

from dataclasses import dataclass, field
from typing import Any

from router.api.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.api.gateway.openai.fields import Fields
from router.api.gateway.openai.schemas import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from router.api.gateway.openapi.answers import INTEGER, TEXT, record, ref, several
from router.api.gateway.responses.schemas import ResponseRequest

OPENAI, ANTHROPIC, TOKENS, SERVER = "OpenAI's API", "Anthropic's API", "Tokens", "Server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    tag: str
    summary: str
    # Any of these is the body.
    takes: tuple[type[Fields], ...] = ()
    # The schema of a whole answer; None: text, of this type.
    answers: dict[str, Any] | None = None
    media_type: str = "text/plain"
    # The schema of a stream's events; None: there is no stream.
    streams: dict[str, Any] | None = None
    is_open: bool = False
    statuses: tuple[int, ...] = field(default=(400, 401, 404, 429, 503))


_NOT_YET = Operation(tag=SERVER, summary="Needs a model that is not served yet", statuses=(404,))

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation(
        tag=OPENAI,
        summary="Completes text",
        takes=(CompletionRequest,),
        answers=ref("Completion"),
        streams=ref("Completion"),
    ),
    ("post", "/v1/chat/completions"): Operation(
        tag=OPENAI,
        summary="Answers a chat",
        takes=(ChatCompletionRequest,),
        answers=ref("ChatCompletion"),
        streams=ref("ChatCompletionChunk"),
    ),
    ("post", "/v1/chat/completions/batch"): Operation(
        tag=OPENAI,
        summary="Answers several chats, as in vLLM",
        takes=(BatchChatRequest,),
        answers=ref("ChatCompletion"),
    ),
    ("post", "/v1/responses"): Operation(
        tag=OPENAI,
        summary="Answers with a response that can be continued",
        takes=(ResponseRequest,),
        answers=ref("Response"),
        streams=ref("TypedEvent"),
    ),
    ("get", "/v1/responses/{response_id}"): Operation(
        tag=OPENAI, summary="A stored response", answers=ref("Response"), statuses=(401, 404, 503)
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(
        tag=OPENAI,
        summary="Deletes a stored response",
        answers=record({"id": TEXT, "object": TEXT, "deleted": {"type": "boolean"}}),
        statuses=(401, 404, 503),
    ),
    ("get", "/v1/streams/{request_id}"): Operation(
        tag=SERVER,
        summary="Goes on with a stream whose request had detach_timeout, behind the event that Last-Event-ID names",
        media_type="text/event-stream",
        statuses=(400, 401, 404),
    ),
    ("delete", "/v1/streams/{request_id}"): Operation(
        tag=SERVER,
        summary="Ends such a stream",
        answers=record({"id": TEXT, "object": TEXT, "deleted": {"type": "boolean"}}),
        statuses=(400, 401, 404),
    ),
    ("get", "/v1/models"): Operation(
        tag=OPENAI,
        summary="The served model",
        answers=record({"object": TEXT, "data": several(ref("Model"))}),
        statuses=(401, 503),
    ),
    ("get", "/v1/models/{model}"): Operation(
        tag=OPENAI, summary="A model by its name", answers=ref("Model"), statuses=(401, 404, 503)
    ),
    ("post", "/invocations"): Operation(
        tag=OPENAI,
        summary="Answers a chat if the body has messages, else completes text (SageMaker)",
        takes=(ChatCompletionRequest, CompletionRequest),
        answers={"anyOf": [ref("ChatCompletion"), ref("Completion")]},
        streams={"anyOf": [ref("ChatCompletionChunk"), ref("Completion")]},
    ),
    ("post", "/v1/messages"): Operation(
        tag=ANTHROPIC,
        summary="Answers a chat",
        takes=(MessagesRequest,),
        answers=ref("AnthropicMessage"),
        streams=ref("TypedEvent"),
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        tag=ANTHROPIC,
        summary="Counts the tokens of a chat",
        takes=(CountTokensRequest,),
        answers=record({"input_tokens": INTEGER}),
    ),
    ("post", "/tokenize"): Operation(
        tag=TOKENS,
        summary="The tokens of a text or a chat",
        takes=(TokenizeRequest, TokenizeChatRequest),
        answers=record(
            {"count": INTEGER, "max_model_len": INTEGER, "tokens": several(INTEGER)}, token_strs=several(TEXT)
        ),
    ),
    ("post", "/detokenize"): Operation(
        tag=TOKENS, summary="The text of tokens", takes=(DetokenizeRequest,), answers=record({"prompt": TEXT})
    ),
    ("get", "/version"): Operation(
        tag=SERVER, summary="Octavo's version", answers=record({"version": TEXT}), statuses=(401,)
    ),
    ("get", "/load"): Operation(
        tag=SERVER,
        summary="The number of live streams of this router process",
        answers=record({"server_load": INTEGER}),
        statuses=(401,),
    ),
    ("get", "/health"): Operation(tag=SERVER, summary="Whether requests are served", is_open=True, statuses=(503,)),
    ("get", "/ping"): Operation(tag=SERVER, summary="The same as /health", statuses=(401, 503)),
    ("post", "/ping"): Operation(tag=SERVER, summary="The same as /health", statuses=(401, 503)),
    ("get", "/metrics"): Operation(
        tag=SERVER, summary="Metrics for Prometheus, with an admin's key", statuses=(401, 403)
    ),
    ("get", "/openapi.json"): Operation(
        tag=SERVER, summary="This document", answers={"type": "object"}, is_open=True, statuses=()
    ),
    ("get", "/docs"): Operation(
        tag=SERVER, summary="This document as a page", media_type="text/html", is_open=True, statuses=(404,)
    ),
}


def operation_of(method: str, path: str, *, is_served: bool) -> Operation:
    """is_served: False for an endpoint that answers only that it is not there yet."""
    if not is_served:
        return _NOT_YET
    return OPERATIONS.get((method, path)) or Operation(tag=SERVER, summary=path, answers={})
