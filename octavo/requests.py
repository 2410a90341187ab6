"""Builds the messages that both clients send."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from protos import inference_pb2 as pb

# {"role": ..., "content": ...}, and what else the model's template shows: {..., "tool_calls": [...]}.
Message = Mapping[str, Any]
# Plain text, messages for the chat template, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]


class RequestOptions(TypedDict, total=False):
    """What a call can say besides prompt and sampling."""

    # The served_model_name; empty: whichever is served.
    model: str
    # Unique among the caller's live requests; empty: one is made.
    request_id: str
    # Lower runs first, under scheduling_policy=priority.
    priority: int
    # Prefix-cache blocks are shared between requests of equal salt only.
    cache_salt: str
    # Requests of one session go to one replica, under routing_policy=consistent_hash.
    session_key: str
    # More variables for the chat template.
    template_arguments: Mapping[str, Any]
    # W3C's headers (traceparent) of the caller's span. Without them those of OpenTelemetry's current span, if there is
    # one.
    trace_headers: Mapping[str, str]


def generate_request(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """Always with a request_id, so that a retry before the first message is recognised as the same request.

    Raises InvalidRequest.
    """
    request = pb.GenerateRequest(
        request_id=options.get("request_id") or uuid.uuid4().hex,
        model=options.get("model", ""),
        sampling=(sampling or SamplingParams()).to_proto(),
        priority=options.get("priority", 0),
        cache_salt=options.get("cache_salt", ""),
        session_key=options.get("session_key", ""),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_prompt(prompt, options.get("template_arguments")))  # type: ignore[arg-type]
    else:
        try:
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"a prompt is text, messages or token ids: {error}") from None
        request.token_ids.SetInParent()
    return request


def chat_prompt(messages: Sequence[Message], template_arguments: Mapping[str, Any] | None) -> pb.ChatPrompt:
    """Raises InvalidRequest."""
    chat = pb.ChatPrompt()
    for message in messages:
        fields = dict(message)
        role, content = fields.pop("role", None), fields.pop("content", None)
        if not isinstance(role, str) or not isinstance(content, str | None) or (content is None and not fields):
            raise InvalidRequest(f"a message has a role and a content, both text, but one has {_types(message)}")
        chat.messages.add(role=role, content=content or "", fields_json=_json(fields, "a message's other fields"))
    chat.template_arguments_json = _json(template_arguments or {}, "template_arguments")
    return chat


def _types(message: Message) -> str:
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in message.items()) or "nothing"


def _json(fields: Mapping[str, Any], name: str) -> str:
    """Nothing if there are none. Raises InvalidRequest."""
    try:
        return json.dumps(dict(fields), allow_nan=False) if fields else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} are no JSON: {error}") from None


def as_messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    """Text stands for one message of the user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def tokenize_request(prompt: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, prompt=prompt)
    return pb.TokenizeRequest(model=model, chat=chat_prompt(prompt, None))
