"""Checks a chat's messages. Every message of an error names the field, the value seen and what would work."""

from collections.abc import Iterator

from protos.inference_pb2 import ChatPrompt
from router.errors import InvalidRequest
from router.request.features.tools import MAX_TOOLS_BYTES, check_calls, check_tools
from router.request.media.asked import check_parts
from router.request.values import check_num_chars
from router.text.request_templates import MAX_TEMPLATE_CHARS

MAX_CHAT_MESSAGES = 16_384
# Bytes that a template gets besides the messages' text: mostly definitions of tools.
MAX_TEMPLATE_ARGUMENTS_BYTES = 2**20
# Messages, of which each may have a thousand parts, are checked one after the other; this many take 1 ms.
_MESSAGES_AT_ONCE = 256


def checks_of_chat(chat: ChatPrompt) -> Iterator[None]:
    """Checks a chat with pauses for an event loop. Raises InvalidRequest."""
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty: give at least one message")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequest(f"chat.messages has {len(chat.messages)} entries: use at most {MAX_CHAT_MESSAGES}")
    if chat.template_arguments_json and chat.HasField("template_arguments"):
        raise InvalidRequest("chat has template_arguments and template_arguments_json: send one of them")
    sizes = {
        "template_arguments": chat.template_arguments.ByteSize(),
        "template_arguments_json": len(chat.template_arguments_json.encode()),
    }
    for name, size in sizes.items():
        if size > MAX_TEMPLATE_ARGUMENTS_BYTES:
            raise InvalidRequest(f"chat.{name} has {size} bytes: at most {MAX_TEMPLATE_ARGUMENTS_BYTES} are allowed")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("chat.continue_final_message is set, and add_generation_prompt, too: use one of them")
    check_tools(chat)
    num_bytes: dict[str, int] = {"fields_json": 0, "tool_calls": 0}
    for i, message in enumerate(chat.messages):
        field = f"chat.messages[{i}]"
        if not message.role:
            raise InvalidRequest(f"{field}.role is empty: use a role of the model's template, such as 'user'")
        check_parts(message, field)
        num_bytes["fields_json"] += len(message.fields_json.encode())
        num_bytes["tool_calls"] += check_calls(message, field)
        if len(message.parts) + i % _MESSAGES_AT_ONCE >= _MESSAGES_AT_ONCE - 1:
            yield
    for name, most in (("fields_json", MAX_TEMPLATE_ARGUMENTS_BYTES), ("tool_calls", MAX_TOOLS_BYTES)):
        if num_bytes[name] > most:
            raise InvalidRequest(f"chat.messages have {num_bytes[name]} bytes of {name}: at most {most} are allowed")


def check_chat_template(source: str, *, is_trusted: bool) -> None:
    """Raises InvalidRequest. is_trusted: option trust_request_chat_template."""
    if source and not is_trusted:
        raise InvalidRequest(
            f"chat.chat_template has {len(source)} characters, but this router renders only the model's own template: "
            "leave it out, or start the router with trust_request_chat_template"
        )
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(f"chat.chat_template has {len(source)} characters: use at most {MAX_TEMPLATE_CHARS}")


def check_chat_length(chat: ChatPrompt, longest_token: int, max_model_len: int) -> None:
    """Refuses messages that are too long together. longest_token: its characters. Raises InvalidRequest."""
    num_chars = sum(
        len(message.content) + len(message.reasoning) + sum(len(part.text) for part in message.parts)
        for message in chat.messages
    )
    check_num_chars(num_chars, longest_token, max_model_len)
