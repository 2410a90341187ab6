"""The valid contents of a body, and the cost of refusing an invalid one."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.convert import chat_message
from router.api.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 200_000 + ["a"]},
        {"prompt": [[1] * 200_000 + ["a"]]},
        {"prompt": ["a"] * 1000},
        {"prompt": [1] * (2**20 + 1)},
        {"prompt": "x", "stop": [1] * 200_000},
        {"prompt": "x", "stop_token_ids": ["a"] * 200_000},
        {"prompt": "x", "logit_bias": {f"a{number}": 1 for number in range(200_000)}},
        {"prompt": "x", "metadata": {f"a{number}": 1 for number in range(200_000)}},
        {"prompt": "x", **{f"a{number}": 1 for number in range(200_000)}},
        {"messages": [1] * 200_000},
        {"messages": [{"role": "user", "content": [1] * 200_000}]},
        {"messages": [], "tools": [1] * 200_000},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 200_000}]},
    ],
)
def test_a_body_that_is_wrong_everywhere_is_read_to_its_first_error(body: dict[str, Any]) -> None:
    schema = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 4, "each error kept takes a kilobyte"


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}


def test_templates_see_tool_calls_and_their_arguments_as_objects() -> None:
    messages = [
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [_call('{"zoo": 9007199254740993, "b": 1.0}'), _call("")]},
        {"role": "tool", "content": [{"type": "text", "text": "17"}], "tool_call_id": "a"},
    ]
    chat = chat_message(ChatCompletionRequest.model_validate({"messages": messages}), "id").chat
    assert [each.content for each in chat.messages] == ["Hi", "", "17"]
    fields = [json.loads(each.fields_json) for each in chat.messages]
    assert fields[0] == {"name": "Ada"}
    assert fields[2] == {"tool_call_id": "a"}
    first, second = fields[1]["tool_calls"]
    assert json.dumps(first["function"]["arguments"]) == '{"zoo": 9007199254740993, "b": 1.0}'
    assert second == {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("arguments", "why"), [("{", "is not valid JSON: "), ("[1]", "is not a JSON object"), ("NaN", "is not")]
)
def test_arguments_that_are_no_object_are_refused_by_name(arguments: str, why: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [_call("{}"), _call(arguments)]}]
    request = ChatCompletionRequest.model_validate({"messages": messages})
    with pytest.raises(BadRequestError, match=rf"^messages\.0\.tool_calls\.1\.function\.arguments {why}"):
        chat_message(request, "id")
