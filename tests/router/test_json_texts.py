"""A JSON text in a message is read alike by all that check it or use it."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protos.inference_pb2 import TOOL_CHOICE_REQUIRED, ChatMessage, ChatPrompt, Constraint, Tool
from router.api.gateway.anthropic.reply import _input
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.convert import _check_arguments
from router.api.gateway.openai.fields import json_text
from router.errors import InvalidConstraint, InvalidRequest
from router.parsing.families import TOOL_FORMATS
from router.parsing.grammar import tool_constraint
from router.parsing.tools import Tools, typed_json
from router.request.features.tools import check_tools
from router.text.chat_template import TemplateError, template_arguments
from runtime.grammar.json_text import finite_json, json_object

REFUSED = {
    "a number beyond a double": '{"properties": {"a": {"const": 1e999}}}',
    "one of many digits": '{"properties": {"a": {"const": ' + "9" * 308 + "e9}}}",
    "one of more digits": '{"properties": {"a": {"const": ' + "9" * 400 + ".0}}}",
    "an integer of too many digits": '{"properties": {"a": {"const": ' + "9" * 5000 + "}}}",
    "NaN": '{"properties": {"a": {"const": NaN}}}',
    "Infinity": '{"properties": {"a": {"const": -Infinity}}}',
    "half of a surrogate pair": '{"properties": {"a": {"const": "\\ud800"}}}',
    "half of one in a name": '{"properties": {"\\udfff": {"const": 1}}}',
    "a byte order mark": '\ufeff{"properties": {"a": {"const": 1}}}',
    "nesting": '{"properties": {"a": {"const": ' + "[" * 300 + "]" * 300 + "}}}",
    "deep nesting": '{"properties": {"a": {"const": ' + "[" * 100_000 + "]" * 100_000 + "}}}",
    "a list": "[]",
    "nothing": " ",
    "a comma": '{"properties": {},}',
    "a control character": '{"properties": {"a": {"const": "\x01"}}}',
}
TAKEN = {
    "plain": '{"properties": {"a": {"type": "integer"}}}',
    "a name twice": '{"properties": {"a": {"type": "string"}}, "properties": {"a": {"type": "integer"}}}',
    "a large integer": '{"properties": {"a": {"type": "integer", "maximum": 1' + "0" * 60 + "}}}",
    "a large number": '{"properties": {"a": {"type": "integer", "maximum": 1e308}}}',
    "characters": '{"properties": {"a": {"type": "integer", "description": "\\ud83c\\udf89 \U0001f389 \\u0000"}}}',
}


def _chat(text: str) -> ChatPrompt:
    return ChatPrompt(
        tools=[Tool(name="f", parameters_json=text)],
        tool_choice=TOOL_CHOICE_REQUIRED,
        messages=[ChatMessage(role="user", content="?")],
    )


def _in_template(text: str) -> Any:
    tools: Any = template_arguments(_chat(text))["tools"]
    return tools[0]["function"]["parameters"]


def _in_grammar(text: str) -> Any:
    constraint = tool_constraint(TOOL_FORMATS["hermes"], _chat(text))
    assert constraint is not None
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "json_schema" in value:
                found.append(value["json_schema"])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(json.loads(constraint.structural_tag))
    return {name: value for name, value in found[0].items() if name != "type"}


READERS: dict[str, tuple[Callable[[str], Any], type[Exception]]] = {
    "check": (lambda text: check_tools(_chat(text)), InvalidRequest),
    "template": (_in_template, TemplateError),
    "grammar": (_in_grammar, ValueError),
    "arguments": (lambda text: _check_arguments(text, "arguments"), BadRequestError),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("reader", READERS)
def test_what_one_refuses_all_refuse(reader: str, case: str) -> None:
    read, error = READERS[reader]
    with pytest.raises(error, match=r"is not valid JSON|is not a JSON object"):
        read(REFUSED[case])
    assert Tools([Tool(name="f", parameters_json=REFUSED[case])]).types("f", "a") == frozenset()
    assert _input(REFUSED[case]) == {"INVALID_JSON": REFUSED[case]}


@pytest.mark.parametrize("case", TAKEN)
def test_what_one_takes_all_take_with_the_same_value(case: str) -> None:
    text = TAKEN[case]
    value = json_object(text, "x")
    for read, _ in READERS.values():
        assert read(text) in (None, value)
    assert Tools([Tool(name="f", parameters_json=text)]).types("f", "a") == {"integer"}
    assert _input(text) == value
    # It can be written again, for clients, templates and grammars.
    assert msgspec.json.decode(msgspec.json.encode(value)) == json.loads(json_text(value, "x")) == value


def test_numbers_are_finite_wherever_they_stand() -> None:
    for text in ("1e400", "[1, -1E+309]", '{"a": {"b": [0.1e310]}}', "9" * 308 + "e1", "9" * 310 + ".5"):
        with pytest.raises(ValueError, match="a number beyond a double"):
            finite_json(text)
    # Digits that are no number.
    assert finite_json('["1e999", "' + "9" * 400 + '"]') == ["1e999", "9" * 400]
    assert finite_json("1e-999") == 0.0


def test_an_argument_that_no_client_can_read_is_a_text() -> None:
    """Formats that write arguments without their type: of what is no JSON the text is the argument."""
    numbers = frozenset({"number"})
    assert typed_json("1e30", numbers) == "1e30"
    for text in ("1e999", "NaN", "-Infinity"):
        assert json.loads(typed_json(text, numbers)) == text
    assert json.loads(typed_json('["\\ud800"]', frozenset({"array"}))) == '["\\ud800"]'


def test_the_schema_of_an_answer_beside_tools_is_read_as_without_them() -> None:
    for text, words in (
        ('{"type": "object", "type": "array"}', "the name 'type' twice"),
        ('{"const": NaN}', "NaN, which is not JSON"),
        ('{"const": "\\ud800"}', "half of a surrogate pair"),
    ):
        chat = _chat("{}")
        chat.ClearField("tool_choice")
        with pytest.raises(InvalidConstraint, match=words):
            tool_constraint(TOOL_FORMATS["hermes"], chat, Constraint(json_schema=text))
