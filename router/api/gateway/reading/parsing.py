"""Converts the body of a request to gRPC's messages.

pydantic holds the interpreter's lock while it parses: 21 MB of `[],[],` took 2 s, in which no other stream went on. So
bodies with much structure are parsed in another process, which returns the messages as bytes.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from protos import inference_pb2 as pb
from router.api.elements import count_all, plan_of
from router.api.gateway.anthropic.convert import chat_of, tokenized_chat_of
from router.api.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.api.gateway.errors import BadRequestError, of_validation
from router.api.gateway.openai.convert import (
    batch_messages,
    chat_message,
    completion_messages,
    detokenize_message,
    tokenize_message,
)
from router.api.gateway.openai.fields import Reading
from router.api.gateway.openai.form import Form, batch_form, chat_form, completion_form
from router.api.gateway.openai.schemas import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from router.api.gateway.responses.convert import response_form, response_message
from router.api.gateway.responses.schemas import ResponseRequest
from router.errors import InvalidRequest

# Larger bodies, and those with more values, are parsed elsewhere: a value takes up to 0.6 us.
_MOST_BYTES_HERE, MOST_VALUES_HERE = 2**20, 16_000
# Values of a body. Each takes up to 100 bytes while it is parsed.
MAX_VALUES = 2**22

# The endpoint's; `any` is a chat if the body has messages, else a completion.
Kind = Literal["completion", "chat", "batch", "any", "tokenize", "detokenize", "messages", "count_tokens", "response"]
Message = pb.GenerateRequest | pb.TokenizeRequest | pb.DetokenizeRequest
_MESSAGES = re.compile(rb'"messages"\s*:')


@dataclass(frozen=True, slots=True)
class Parsed:
    kind: Kind
    form: Form
    # One for each prompt.
    messages: list[Message]
    # Names of fields that nobody knows.
    ignored: tuple[str, ...] = ()

    def take_requests(self) -> list[pb.GenerateRequest]:
        """Returns the messages of a completion or chat, which are not here any more: they may be large."""
        taken = [message for message in self.messages if isinstance(message, pb.GenerateRequest)]
        self.messages.clear()
        return taken


def is_light(body: bytes | bytearray) -> bool:
    """Tells whether parsing takes little enough time for an event loop: 10 ms at most."""
    # Commas and brackets in strings count, too: to leave them out would take longer than to parse.
    return len(body) <= _MOST_BYTES_HERE and sum(map(body.count, (b",", b"[", b"{"))) <= MOST_VALUES_HERE


def parse(kind: Kind, body: bytes | bytearray, request_id: str, *, is_strict: bool) -> Parsed:
    """request_id: for a body without one. is_strict: option strict_fields. Raises BadRequestError."""
    reading = Reading(is_strict)
    has_messages = _MESSAGES.search(body) is not None
    if kind == "any":
        kind = "chat" if has_messages else "completion"
    form, messages = Form(), list[Message]()
    try:
        match kind:
            case "chat":
                chat = ChatCompletionRequest.model_validate_json(body, context=reading)
                form, messages = chat_form(chat), [chat_message(chat, chat.request_id or request_id)]
            case "batch":
                batch = BatchChatRequest.model_validate_json(body, context=reading)
                form, messages = batch_form(batch), [*batch_messages(batch, batch.request_id or request_id)]
            case "completion":
                completion = CompletionRequest.model_validate_json(body, context=reading)
                form = completion_form(completion)
                messages = [*completion_messages(completion, completion.request_id or request_id)]
            case "messages":
                chat = chat_of(MessagesRequest.model_validate_json(body, context=reading))
                form = replace(chat_form(chat), schema_field="tools.{}.input_schema")
                if form.constraint_field:
                    form = replace(form, constraint_field="output_config.format")
                messages = [chat_message(chat, request_id)]
            case "count_tokens":
                counted = CountTokensRequest.model_validate_json(body, context=reading)
                messages = [tokenize_message(tokenized_chat_of(counted))]
            case "tokenize":
                schema = TokenizeChatRequest if has_messages else TokenizeRequest
                asked = schema.model_validate_json(body, context=reading)
                form = Form(has_token_ids=asked.return_token_strs)
                messages = [tokenize_message(asked)]
            case "detokenize":
                messages = [detokenize_message(DetokenizeRequest.model_validate_json(body, context=reading))]
            case "response":
                response = ResponseRequest.model_validate_json(body, context=reading)
                form = response_form(response)
                messages = [response_message(response, response.request_id or request_id)]
    except ValidationError as error:
        raise of_validation(error) from None
    return Parsed(kind, form, list[Message](messages), tuple(reading.ignored))


# A message of a Parsed as bytes, and its type's name.
Sent = tuple[str, bytes]


def parse_to_bytes(
    kind: Kind, body: bytes, request_id: str, is_strict: bool, most_chars: int
) -> tuple[Parsed, list[Sent]]:
    """Does what parse() does, for another process: messages come as bytes.

    Raises BadRequestError, also for too many values, or characters of a prompt (most_chars; 0: any number).
    """
    num_values = sum(map(_without_strings(body).count, (b",", b"[", b"{")))
    if num_values > MAX_VALUES:
        raise BadRequestError(f"the body has {num_values} values: use at most {MAX_VALUES}")
    parsed = parse(kind, body, request_id, is_strict=is_strict)
    for message in parsed.messages:
        if isinstance(message, pb.DetokenizeRequest):
            continue
        num_chars = len(message.prompt) + sum(
            len(each.content) + sum(len(part.text) for part in each.parts) for each in message.chat.messages
        )
        if isinstance(message, pb.GenerateRequest):
            num_chars += len(message.suffix)
        if most_chars and num_chars > most_chars:
            raise BadRequestError(f"a prompt has {num_chars} characters: this model takes {most_chars} at most")
    sent = [(type(message).__name__, message.SerializeToString()) for message in parsed.messages]
    try:
        for message, (_, data) in zip(parsed.messages, sent, strict=True):
            count_all(data, plan_of(message.DESCRIPTOR))
    except InvalidRequest as error:
        raise BadRequestError(str(error)) from None
    return Parsed(parsed.kind, parsed.form, [], parsed.ignored), sent


def received(parsed: Parsed, sent: list[Sent]) -> Parsed:
    """Puts together what parse_to_bytes() returned."""
    messages = [getattr(pb, name).FromString(message) for name, message in sent]
    return Parsed(parsed.kind, parsed.form, messages, parsed.ignored)


def _without_strings(body: bytes) -> bytes:
    return re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", body, flags=re.DOTALL)
