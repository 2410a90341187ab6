"""Converts the body of a request to gRPC's messages.

pydantic holds the interpreter's lock while it parses: 21 MB of `[],[],` took 2 s, in which no other stream went on. So
bodies with much structure are parsed in another process, which returns the messages as bytes.
"""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from protos import inference_pb2 as pb
from router.api.gateway.convert import chat_message, completion_messages
from router.api.gateway.errors import BadRequestError, of_validation
from router.api.gateway.schemas import ChatCompletionRequest, CompletionRequest

# Larger bodies, and those with more values, are parsed elsewhere: a value takes up to 0.3 us.
_MOST_BYTES_HERE, _MOST_VALUES_HERE = 2**20, 50_000
# Values of a body. Each takes up to 100 bytes while it is parsed.
MAX_VALUES = 2**22

Kind = Literal["completion", "chat"]


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer looks like."""

    # Choices of each prompt.
    n: int
    is_stream: bool
    has_usage_chunk: bool
    has_logprobs: bool
    # The prompt comes first.
    has_echo: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    form: Form
    # One for each prompt.
    messages: list[pb.GenerateRequest]


def is_light(body: bytes | bytearray) -> bool:
    """Tells whether parsing takes little enough time for an event loop: 15 ms at most."""
    # Commas and brackets in strings count, too: to leave them out would take longer than to parse.
    return len(body) <= _MOST_BYTES_HERE and sum(map(body.count, (b",", b"[", b"{"))) <= _MOST_VALUES_HERE


def parse(kind: Kind, body: bytes | bytearray, request_id: str) -> Parsed:
    """Raises BadRequestError."""
    try:
        if kind == "chat":
            chat = ChatCompletionRequest.model_validate_json(body)
            messages, has_logprobs, has_echo, asked = [chat_message(chat, request_id)], chat.logprobs, False, chat
        else:
            completion = CompletionRequest.model_validate_json(body)
            messages = completion_messages(completion, request_id)
            has_logprobs, has_echo, asked = completion.logprobs is not None, completion.echo, completion
    except ValidationError as error:
        raise of_validation(error) from None
    form = Form(
        n=asked.n,
        is_stream=asked.stream,
        has_usage_chunk=asked.stream_options is not None and asked.stream_options.include_usage,
        has_logprobs=has_logprobs,
        has_echo=has_echo,
    )
    return Parsed(form, messages)


def parse_to_bytes(kind: Kind, body: bytes, request_id: str, most_chars: int) -> tuple[Form, list[bytes]]:
    """Does what parse() does, for another process. Raises BadRequestError, also for too many values, or characters of a
    prompt (0: any number)."""
    num_values = sum(map(_without_strings(body).count, (b",", b"[", b"{")))
    if num_values > MAX_VALUES:
        raise BadRequestError(f"the body has {num_values} values: use at most {MAX_VALUES}")
    parsed = parse(kind, body, request_id)
    for message in parsed.messages:
        num_chars = len(message.prompt) + sum(len(each.content) for each in message.chat.messages)
        if most_chars and num_chars > most_chars:
            raise BadRequestError(f"a prompt has {num_chars} characters: this model takes {most_chars} at most")
    return parsed.form, [message.SerializeToString() for message in parsed.messages]


def _without_strings(body: bytes) -> bytes:
    return re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", body, flags=re.DOTALL)
