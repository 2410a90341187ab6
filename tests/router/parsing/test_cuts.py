"""A parser's output is a function of the text so far: however it is cut, and wherever a resume goes on."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.inference_pb2 import TOOL_CHOICE_REQUIRED, ChatPrompt
from router.parsing.families import TOOL_FORMATS
from router.parsing.parser import HARMONY_REASONING
from router.parsing.reasoning import REASONING_FORMATS
from tests.router.parsing.outputs import BROKEN, WHOLE
from tests.support.parsing import CHAT, Parsed, new_parser, parse

REQUIRED = ChatPrompt(tools=CHAT.tools, tool_choice=TOOL_CHOICE_REQUIRED)
PAIRS = [(name, "") for name in TOOL_FORMATS] + [("hermes", name) for name in REASONING_FORMATS]
PAIRS += [("openai", HARMONY_REASONING), ("", "qwen3")]


def so_far(pieces: Sequence[str], calls: str, reasoning: str, chat: ChatPrompt) -> Parsed:
    """The deltas that come before the text ends."""
    parser, parsed = new_parser(calls, reasoning, chat), Parsed()
    for piece in pieces:
        parsed.add(parser.push(piece))
    return parsed


def check_cuts(text: str, calls: str, reasoning: str = "", chat: ChatPrompt = CHAT) -> None:
    whole = parse(text, calls, reasoning, chat)
    assert parse(list(text), calls, reasoning, chat) == whole
    one_by_one, parsed = new_parser(calls, reasoning, chat), Parsed()
    for position, char in enumerate(text, 1):
        parsed.add(one_by_one.push(char))
        before, behind = text[:position], text[position:]
        assert so_far([before], calls, reasoning, chat) == parsed
        # A resume: the text delivered, whose deltas the client has, then the rest.
        resumed = new_parser(calls, reasoning, chat)
        client = Parsed(parsed.content, parsed.reasoning, [list(call) for call in parsed.calls])
        resumed.push(before)
        client.add(resumed.push(behind))
        assert client.add(resumed.finish()) == whole


@pytest.mark.parametrize("output", WHOLE + BROKEN, ids=lambda output: f"{output.calls}:{output.text[:40]!r}")
def test_documented_and_broken_outputs_at_every_cut(output):
    check_cuts(output.text, output.calls)


def test_reasoning_before_calls_at_every_cut():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>'
    for name, form in REASONING_FORMATS.items():
        text = f"\n{form.begins[0]}I look.</thin{form.ends[0]}\n\nSee: {call}"
        parsed = parse(text, "hermes", name)
        assert (parsed.reasoning, parsed.content) == ("I look.</thin", "\n\nSee: ")
        assert parsed.named == [("f", '{"a": "<think>"}')]
        check_cuts(text, "hermes", name)


# What formats look for, and parts of calls, so that random texts get far into them.
FRAGMENTS = sorted(
    {mark for form in TOOL_FORMATS.values() for mark in form.marks}
    | {mark for form in REASONING_FORMATS.values() for mark in form.begins + form.ends}
    | set("<>[](){}\"',:=\\|/ \n\t01-.eaux")
    | {
        "</tool_call>",
        '{"name": "f", "arguments": {',
        '{"name": "g", "parameters": {}}',
        '"arguments": {"a": ',
        '"name"',
    }
    | {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"}
    | {
        "[ARGS]",
        "[CALL_ID]",
        "call:f{a:",
        '<|"|>',
        "<escape>",
        "<tool_call|>",
        "<end_function_call>",
        "[f(",
        "b='",
        "a=",
    }
    | {"<parameter=a>", "</parameter>", "</function>", "<function=get_weather>", "<parameter=days>", "true", "None"}
    | {"<|start|>assistant", "<|channel|>final", "<|message|>", "<|end|>", "<|call|>", " to=functions.f", "analysis"}
    | {"\\u00e9", "\\ud83d", "\\x41", "é🎉", "null", "-1.5e+3", "functools["}
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PAIRS), st.booleans(), st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14))
def test_random_texts_never_raise_and_give_the_same_however_they_are_cut(pair, is_required, fragments):
    chat = REQUIRED if is_required else CHAT
    calls, reasoning = pair
    whole = parse("".join(fragments), calls, reasoning, chat)
    assert parse(fragments, calls, reasoning, chat) == whole
    check_cuts("".join(fragments), calls, reasoning, chat)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([name for name in TOOL_FORMATS if name != "openai"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=30),
)
def test_text_without_tools_is_neither_lost_nor_changed(calls, fragments):
    text = "".join(fragments)
    assert parse(text, calls, chat=ChatPrompt()) == Parsed(text)
