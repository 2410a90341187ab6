"""The valid contents of a chat."""

import pytest

from protos.inference_pb2 import ChatMessage, ChatPrompt
from router.errors import InvalidRequest
from router.request.chat import MAX_CHAT_MESSAGES, MAX_TEMPLATE_ARGUMENTS_BYTES, checks_of_chat

_USER = ChatMessage(role="user", content="Hi")
_HALF = '"' + "é" * (MAX_TEMPLATE_ARGUMENTS_BYTES // 4) + '"'


def _with_both() -> ChatPrompt:
    chat = ChatPrompt(messages=[_USER], template_arguments_json="{}")
    chat.template_arguments.SetInParent()
    return chat


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (ChatPrompt(), r"chat\.messages is empty"),
        (ChatPrompt(messages=[_USER] * (MAX_CHAT_MESSAGES + 1)), r"chat\.messages has \d+ entries: use at most"),
        (ChatPrompt(messages=[_USER, ChatMessage(content="Hi")]), r"chat\.messages\[1\]\.role is empty"),
        (_with_both(), "send one of them"),
        (ChatPrompt(messages=[_USER], template_arguments_json=_HALF * 2), r"template_arguments_json has \d+ bytes"),
        (ChatPrompt(messages=[ChatMessage(role="tool", fields_json=_HALF)] * 2), r"\d+ bytes of fields_json: at most"),
    ],
)
def test_a_chat_is_refused_by_the_name_of_what_is_wrong(chat: ChatPrompt, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        list(checks_of_chat(chat))


def test_one_within_its_bounds_is_taken() -> None:
    messages = [_USER] * (MAX_CHAT_MESSAGES - 1) + [ChatMessage(role="tool", fields_json=_HALF)]
    list(checks_of_chat(ChatPrompt(messages=messages, template_arguments_json=_HALF)))
