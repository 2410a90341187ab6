"""Text that a structural tag lets through is read as calls by the same format's parser."""

import json
from collections.abc import Iterator

import pytest

from benchmarks.grammar.engines import accepts, engine
from protos.inference_pb2 import (
    TOOL_CHOICE_AUTO,
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    ChatPrompt,
    Tool,
)
from router.parsing.families import TOOL_FORMATS
from router.parsing.grammar import UnenforceableError, tool_constraint
from router.parsing.parser import OutputFormat
from tests.support.parsing import parse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [Tool(name="get_weather", parameters_json=json.dumps(SCHEMA), strict=True), Tool(name="get_time")]
NO_SCHEMA = {"type": "object"}
ARGUMENTS = {json.dumps(SCHEMA): '{"city": "Tokyo"}', json.dumps(NO_SCHEMA): "{}"}
WITH_GRAMMAR = [name for name, form in TOOL_FORMATS.items() if form.markup is not None]


def tag_of(name: str, chat: ChatPrompt) -> tuple[dict, str]:
    constraint = tool_constraint(TOOL_FORMATS[name], chat)
    assert constraint is not None
    tag = json.loads(constraint.structural_tag)
    assert tag["type"] == "structural_tag"
    return tag["format"], constraint.after


def outputs(form: dict) -> Iterator[str]:
    """Texts that a format of a structural tag lets through."""
    match form:
        case {"type": "json_schema", "json_schema": schema}:
            yield ARGUMENTS[json.dumps(schema)]
        case {"type": "tag", "begin": begin, "content": content, "end": end}:
            yield from (begin + text + end for text in outputs(content))
        case {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}:
            each = [next(outputs(tag)) for tag in tags]
            yield from each
            if not form["stop_after_first"]:
                yield separator.join(each)
                yield separator.join(each + each)
        case {"type": "triggered_tags", "triggers": [trigger], "tags": tags}:
            for tag in tags:
                for text in outputs(tag):
                    assert text.startswith(trigger)
                    yield f"I look. {text}"
        case _:
            raise AssertionError(form)


def named(name: str, text: str, chat: ChatPrompt) -> list[tuple[str, str]]:
    # The part before `after`, as gpt-oss writes it.
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "openai" else ""
    parsed = parse(before + text, name, chat=chat)
    assert parsed.content in ("", "I look. ")
    return parsed.named


WEATHER, TIME = ("get_weather", '{"city": "Tokyo"}'), ("get_time", "{}")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required(name):
    chat = ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_REQUIRED)
    form, after = tag_of(name, chat)
    assert after == ("<|start|>assistant" if name == "openai" else "")
    calls = [named(name, text, chat) for text in outputs(form)]
    assert calls == [[WEATHER], [TIME], [WEATHER, TIME], [WEATHER, TIME, WEATHER, TIME]]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_without_parallel_calls(name):
    chat = ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_REQUIRED, parallel_tool_calls=False)
    assert [named(name, text, chat) for text in outputs(tag_of(name, chat)[0])] == [[WEATHER], [TIME]]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_named(name):
    chat = ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_NAMED, tool_name="get_time")
    assert [named(name, text, chat) for text in outputs(tag_of(name, chat)[0])] == [[TIME]]


@pytest.mark.parametrize("name", sorted({*WITH_GRAMMAR} - {"openai"}))
@pytest.mark.parametrize("parallel", [True, False])
def test_auto_with_strict_tools_begins_at_the_trigger(name, parallel):
    chat = ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_AUTO, parallel_tool_calls=parallel)
    form, after = tag_of(name, chat)
    assert (form["type"], form["stop_after_first"], after) == ("triggered_tags", not parallel, "")
    calls = [parse(text, name, chat=chat).named for text in outputs(form)]
    assert calls[:2] == [[WEATHER], [TIME]]
    # Formats with marks around all calls have them in one tag.
    assert calls[2:] == ([[WEATHER, TIME], [WEATHER, TIME, WEATHER, TIME]] if len(calls) > 2 else [])


def test_auto_with_strict_tools_leaves_harmony_its_channels() -> None:
    """Reasoning and preambles, then calls or an answer."""
    chat = ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_AUTO)
    constraint = tool_constraint(TOOL_FORMATS["openai"], chat)
    assert constraint is not None
    canonical, more = engine().canonical(constraint), "<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    preambles = f"<|channel|>analysis<|message|>Hm.{more}<|channel|>commentary<|message|>I look.{more}"
    both = f"{call}{WEATHER[1]}<|call|><|start|>assistant{call}{WEATHER[1]}"
    for text, calls in (
        (preambles + call + WEATHER[1], [WEATHER]),
        (both, [WEATHER, WEATHER]),
        (f"{preambles}<|channel|>final<|message|>It is warm.", []),
    ):
        assert accepts(engine().matcher(canonical), text), text
        assert parse(text, "openai", chat=chat).named == calls
    for text in (
        call + '{"city": 3}',
        f"<|channel|>analysis<|message|>{call}{{}}{more}{both}",
        f"<|channel|>final<|message|>I call.<|start|>assistant{call}{{}}",
        preambles,
        "It is warm.",
    ):
        assert not accepts(engine().matcher(canonical), text), text


BLOCKS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a name"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "days"],
}


def blocks(**values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=get_weather>\n{written}</function>\n</tool_call>"


def test_auto_with_strict_tools_in_blocks_of_parameters() -> None:
    chat = ChatPrompt(tools=[Tool(name="get_weather", parameters_json=json.dumps(BLOCKS), strict=True), TOOLS[1]])
    constraint = tool_constraint(TOOL_FORMATS["qwen3_coder"], chat)
    assert constraint is not None
    canonical = engine().canonical(constraint)

    def called(text: str) -> list[dict] | None:
        if not accepts(engine().matcher(canonical), text):
            return None
        return [json.loads(arguments) for _, arguments in parse(text, "qwen3_coder", chat=chat).named]

    whole = blocks(city="São\n\nPaulo ", days="3", unit="celsius", hours="[1, 2]")
    arguments = {"city": "São\n\nPaulo ", "days": 3, "unit": "celsius", "hours": [1, 2]}
    free = "<tool_call>\n<function=get_time>\n<parameter=any>\nthing\n</parameter>\n</function>\n</tool_call>"
    assert called(f"I look.\n{whole}\n{free}") == [arguments, {"any": "thing"}]
    assert called(blocks(city="", days="3")) == [{"city": "", "days": 3}]
    assert called("It is < 3 degrees.") == []
    for wrong in (
        blocks(city="a"),
        blocks(days="3", city="a"),
        blocks(city="a", days="0"),
        blocks(city="a", days="3", unit="kelvin"),
        blocks(city="a", days="3", more="x"),
        blocks(city="a<parameter=days>b", days="3"),
        whole.removeprefix("<tool_call>\n"),
        free.replace("get_time", "get_date"),
    ):
        assert called(wrong) is None, wrong


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pattern": "^a"}, "the schema of 'city'"),
        ({"type": ["string", "null"]}, "the schema of 'city'"),
        ({"type": "array", "items": {"type": "string"}}, "the schema of 'city'"),
        ({"type": "object", "properties": {}}, "the schema of 'city'"),
        ({"enum": ["</parameter>"]}, "the schema of 'city'"),
    ],
)
def test_a_schema_without_an_exact_block_is_refused_by_its_place(change: dict, named: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"} | change}}
    chat = ChatPrompt(tools=[Tool(name="f", parameters_json=json.dumps(schema), strict=True)])
    with pytest.raises(UnenforceableError, match=f"tool f is strict, and {named} has no exact grammar"):
        tool_constraint(TOOL_FORMATS["qwen3_coder"], chat)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - set(WITH_GRAMMAR) - {"qwen3_coder"}))
def test_auto_with_strict_tools_needs_json(name):
    with pytest.raises(UnenforceableError, match=f"format {name}; use tool_choice required"):
        tool_constraint(TOOL_FORMATS[name], ChatPrompt(tools=TOOLS))


def test_mistral_is_enforced_as_the_template_writes_it():
    """mistral-common's templates since version 11 write each call as name and arguments."""
    shown = "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}"
    form = OutputFormat.named("mistral", "", shown).calls
    assert OutputFormat.named("mistral", "", "'[TOOL_CALLS] [' {{ calls }}").calls is TOOL_FORMATS["mistral"]
    for choice in (TOOL_CHOICE_REQUIRED, TOOL_CHOICE_AUTO):
        chat = ChatPrompt(tools=TOOLS, tool_choice=choice)
        constraint = tool_constraint(form, chat)
        assert constraint is not None
        texts = [text.removeprefix("I look. ") for text in outputs(json.loads(constraint.structural_tag)["format"])]
        assert texts[0] == '[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}'
        calls = [named("mistral", text, chat) for text in texts]
        assert calls[:2] == [[WEATHER], [TIME]]
        assert choice == TOOL_CHOICE_AUTO or calls[2] == [WEATHER, TIME]
        canonical = engine().canonical(constraint)
        assert all(accepts(engine().matcher(canonical), text) for text in texts)


@pytest.mark.parametrize("choice", [TOOL_CHOICE_AUTO, TOOL_CHOICE_REQUIRED])
def test_only_allowed_tools_are_called(choice):
    chat = ChatPrompt(tools=TOOLS, tool_choice=choice, allowed_tool_names=["get_time"])
    calls = [named("hermes", text, chat) for text in outputs(tag_of("hermes", chat)[0])]
    assert calls[0] == [TIME]
    assert all(call == TIME for found in calls for call in found)
    # Other calls than those of the grammar cannot be prevented.
    if choice == TOOL_CHOICE_AUTO:
        with pytest.raises(UnenforceableError, match=r"allowed tools with tool_choice auto: .* format pythonic"):
            tool_constraint(TOOL_FORMATS["pythonic"], chat)


def test_nothing_is_enforced_without_need():
    form = TOOL_FORMATS["hermes"]
    assert tool_constraint(form, ChatPrompt()) is None
    assert tool_constraint(form, ChatPrompt(tools=[Tool(name="f")])) is None
    assert tool_constraint(form, ChatPrompt(tools=TOOLS, tool_choice=TOOL_CHOICE_NONE)) is None


def test_a_schema_that_is_not_json_is_refused_by_the_tools_name():
    chat = ChatPrompt(tools=[Tool(name="f", parameters_json="{")], tool_choice=TOOL_CHOICE_REQUIRED)
    with pytest.raises(ValueError, match="parameters_json of tool f is not valid JSON"):
        tool_constraint(TOOL_FORMATS["hermes"], chat)
    chat.tools[0].parameters_json = "[]"
    with pytest.raises(ValueError, match="parameters_json of tool f is not a JSON object"):
        tool_constraint(TOOL_FORMATS["hermes"], chat)


def test_a_trigger_is_the_mark_alone():
    """So a call is enforced whatever the model writes behind it."""
    triggers = {name: TOOL_FORMATS[name].markup.trigger for name in WITH_GRAMMAR}  # type: ignore[union-attr]
    assert triggers["hermes"] == "<tool_call>"
    assert triggers["mistral"] == "[TOOL_CALLS]"
    assert triggers["phi4_mini_json"] == "functools["
    assert triggers["llama3_json"] == '{"name": "'
