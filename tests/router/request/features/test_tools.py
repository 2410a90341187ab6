"""The valid tools of a chat, and the constraints that follow from them."""

import json
from types import SimpleNamespace

import pytest

from protos.inference_pb2 import (
    TOOL_CHOICE_AUTO,
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    BeamSearch,
    ChatMessage,
    ChatPrompt,
    Constraint,
    GenerateRequest,
    Resume,
    SamplingParams,
    Tool,
    ToolCall,
)
from router.errors import InvalidRequest
from router.request.chat import checks_of_chat
from router.request.features.tools import MAX_TOOLS, MAX_TOOLS_BYTES, check_tools
from router.request.outputs import Outputs

_F = Tool(name="f")
_LONG = json.dumps({"description": "x" * (MAX_TOOLS_BYTES // 2)})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (ChatPrompt(tool_choice=TOOL_CHOICE_REQUIRED), r"chat\.tool_choice asks for a call, and chat\.tools is empty"),
        (ChatPrompt(tool_choice=9), r"chat\.tool_choice=9: use one of TOOL_CHOICE_"),  # type: ignore[arg-type]
        (ChatPrompt(tools=[_F], tool_name="f"), r"chat\.tool_name='f': it goes with TOOL_CHOICE_NAMED"),
        (ChatPrompt(tools=[_F], tool_choice=TOOL_CHOICE_NAMED, tool_name="g"), r"'g' is not among chat\.tools"),
        (
            ChatPrompt(tools=[_F], allowed_tool_names=["f", "g"]),
            r"chat\.allowed_tool_names has 'g', which is not among",
        ),
        (
            ChatPrompt(tools=[_F], allowed_tool_names=["f"], tool_choice=TOOL_CHOICE_NONE),
            r"chat\.allowed_tool_names is set with TOOL_CHOICE_NONE: it goes with TOOL_CHOICE_AUTO",
        ),
        (ChatPrompt(tools=[Tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)]), r"chat\.tools has 1025 entries"),
        (ChatPrompt(tools=[Tool(name=n, parameters_json=_LONG) for n in "fg"]), r"chat\.tools has \d+ bytes: at most"),
        (ChatPrompt(tools=[_F, Tool()]), r"chat\.tools\[1\]\.name='': use 1 to 128 letters"),
        (ChatPrompt(tools=[Tool(name='f"')]), r"chat\.tools\[0\]\.name='f\"': use 1 to 128"),
        (ChatPrompt(tools=[Tool(name="x" * 129)]), r"chat\.tools\[0\]\.name='x+'?: use 1 to 128"),
        (ChatPrompt(tools=[_F, _F]), r"chat\.tools\[1\]\.name='f' comes twice"),
        (
            ChatPrompt(tools=[Tool(name="f", parameters_json="{")]),
            r"chat\.tools\[0\]\.parameters_json is not valid JSON",
        ),
        (ChatPrompt(tools=[Tool(name="f", parameters_json="[]")]), r"parameters_json is not a JSON object"),
    ],
)
def test_tools_are_refused_by_the_name_of_what_is_wrong(chat: ChatPrompt, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_tools(chat)


def test_tools_within_the_bounds_pass() -> None:
    names = ["x" * 128, "mcp__a-b.c_1", *(f"f{i}" for i in range(MAX_TOOLS - 2))]
    check_tools(ChatPrompt(tools=[Tool(name=name) for name in names], tool_choice=TOOL_CHOICE_NAMED, tool_name="f7"))


def test_calls_have_names_and_a_bound() -> None:
    said = ChatMessage(role="assistant", tool_calls=[ToolCall(name="f"), ToolCall(arguments="{}")])
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[1\]\.tool_calls\[1\]\.name is empty"):
        list(checks_of_chat(ChatPrompt(messages=[ChatMessage(role="user"), said])))
    large = ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments=_LONG)])
    list(checks_of_chat(ChatPrompt(messages=[large])))
    with pytest.raises(InvalidRequest, match=r"chat\.messages have \d+ bytes of tool_calls"):
        list(checks_of_chat(ChatPrompt(messages=[large, large])))


# --- Constraints


class _Tokens:
    """The part of a tokenizer that Outputs needs: a token is a character."""

    chat_template = ""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def resolved(
    message: GenerateRequest, calls: str = "hermes", reasoning: str = "none", prompt: str = "assistant\n"
) -> SamplingParams:
    sampling = SamplingParams()
    sampling.CopyFrom(message.sampling)
    outputs = Outputs(_Tokens(), calls, reasoning)  # type: ignore[arg-type]
    outputs.resolve(message, sampling, list(map(ord, prompt)), set())
    return sampling


def asked(choice: int = TOOL_CHOICE_REQUIRED, tool: Tool = _F, **fields: object) -> GenerateRequest:
    chat = ChatPrompt(tools=[tool], tool_choice=choice)  # type: ignore[arg-type]
    return GenerateRequest(chat=chat, parse_output=True, **fields)  # type: ignore[arg-type]


def test_a_call_that_must_come_is_a_constraint() -> None:
    tag = json.loads(resolved(asked()).constraint.structural_tag)
    assert tag["format"]["tags"][0]["begin"] == '<tool_call>\n{"name": "f", "arguments": '
    for choice in (TOOL_CHOICE_AUTO, TOOL_CHOICE_NONE):
        assert not resolved(asked(choice)).HasField("constraint")
    assert resolved(asked(TOOL_CHOICE_AUTO, Tool(name="f", strict=True))).HasField("constraint")


def test_models_without_a_format_write_the_call_that_must_come_as_json() -> None:
    tag = json.loads(resolved(asked(), calls="none").constraint.structural_tag)
    assert (tag["format"]["begin"], tag["format"]["end"]) == ("[", "]")
    # They write no call by themselves.
    assert not resolved(asked(TOOL_CHOICE_AUTO, Tool(name="f", strict=True)), calls="none").HasField("constraint")


def test_constraints_begin_behind_the_reasoning() -> None:
    def after(message: GenerateRequest, **options: str) -> str:
        return resolved(message, **options).constraint.after

    assert after(asked(), reasoning="qwen3") == "</think>"
    assert after(asked(), reasoning="qwen3", prompt="assistant\n<think>\n\n</think>\n\n") == ""
    own = SamplingParams(constraint=Constraint(json_object=True))
    assert after(asked(TOOL_CHOICE_AUTO, sampling=own), reasoning="qwen3") == "</think>"
    assert after(asked(TOOL_CHOICE_NONE, sampling=own), calls="openai") == "<|channel|>final<|message|>"
    # A call may come as well.
    assert after(asked(TOOL_CHOICE_AUTO, sampling=own), calls="openai") == "<|start|>assistant"
    assert after(asked(), calls="openai") == "<|start|>assistant"
    # Outputs that are not parsed are as the client wants them.
    message = asked(TOOL_CHOICE_AUTO, sampling=own)
    message.parse_output = False
    assert after(message, reasoning="qwen3") == ""
    own.constraint.after = "</plan>"
    assert after(asked(TOOL_CHOICE_AUTO, sampling=own), reasoning="qwen3") == "</plan>"


CITY = '{"type": "object", "properties": {"city": {"type": "string"}}}'


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("calls", ["hermes", "mistral", "openai"])
def test_calls_may_take_the_place_of_an_answer_that_is_json(calls: str, is_strict: bool) -> None:
    own = SamplingParams(constraint=Constraint(json_schema=CITY, disable_any_whitespace=True))
    found = resolved(asked(TOOL_CHOICE_AUTO, Tool(name="f", strict=is_strict), sampling=own), calls=calls).constraint
    tag = json.loads(found.structural_tag)["format"]
    call, answer = tag["elements"]
    assert (tag["type"], found.disable_any_whitespace) == ("or", True)
    begins = {"hermes": "<tool_call>\n{", "mistral": "[TOOL_CALLS][", "openai": "<|channel|>commentary"}[calls]
    assert call.get("begin", call.get("tags", [{}])[0].get("begin")).startswith(begins)
    if calls == "openai":
        assert answer["begin"] == "<|channel|>final<|message|>"
        answer = answer["content"]
    assert answer == {"type": "json_schema", "json_schema": json.loads(CITY)}


def test_an_answer_that_is_json_leaves_a_call_that_must_come_as_it_is() -> None:
    own = SamplingParams(constraint=Constraint(json_object=True))
    assert resolved(asked(sampling=own)) == resolved(asked())


def test_an_answer_of_another_kind_has_no_calls_beside_it() -> None:
    """Neither has one in a format without a grammar, nor one that the client parses."""
    for constraint in (Constraint(regex="a"), Constraint(json_object=True, after="</plan>")):
        own = SamplingParams(constraint=constraint)
        assert resolved(asked(TOOL_CHOICE_AUTO, sampling=own)).constraint == constraint
        with pytest.raises(
            InvalidRequest, match=r"^sampling\.constraint: it is set, and chat\.tool_choice or a strict tool"
        ):
            resolved(asked(TOOL_CHOICE_AUTO, Tool(name="f", strict=True), sampling=own))
    own = SamplingParams(constraint=Constraint(json_object=True))
    assert resolved(asked(TOOL_CHOICE_AUTO, sampling=own), calls="gemma4").constraint == own.constraint
    message = asked(TOOL_CHOICE_AUTO, sampling=own)
    message.parse_output = False
    assert resolved(message) == own


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling": SamplingParams(constraint=Constraint(regex="a"))}, r"sampling\.constraint: it is set"),
        ({"sampling": SamplingParams(ignore_eos=True)}, r"sampling\.ignore_eos is set"),
        ({"beam_search": BeamSearch(width=2)}, "beam_search is set"),
    ],
)
def test_what_does_not_go_with_a_call_that_must_come_is_refused(fields: dict, name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name},? ?(and)? chat\.tool_choice"):
        resolved(asked(**fields))


def test_strict_tools_without_a_grammar_are_refused_by_the_formats_name() -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.tools: strict tools .* gemma4"):
        resolved(asked(TOOL_CHOICE_AUTO, Tool(name="f", strict=True)), calls="gemma4")


def test_a_resume_brings_its_constraint() -> None:
    own = SamplingParams(constraint=Constraint(structural_tag="{}", after="x"))
    message = asked(sampling=own, resume=Resume(attempt=1))
    assert resolved(message, reasoning="qwen3").constraint == own.constraint
    message.chat.tools[0].name = ""
    with pytest.raises(InvalidRequest, match="name=''"):
        resolved(message)


def test_outputs_are_parsed_where_they_may_be_more_than_an_answer() -> None:
    def are_parsed(calls: str, reasoning: str, chat: ChatPrompt) -> bool:
        outputs = Outputs(SimpleNamespace(chat_template=""), calls, reasoning)  # type: ignore[arg-type]
        return outputs.are_parsed(chat)

    tools = ChatPrompt(tools=[_F])
    assert are_parsed("hermes", "none", tools)
    assert not are_parsed("hermes", "none", ChatPrompt())
    assert not are_parsed("hermes", "none", ChatPrompt(tools=[_F], tool_choice=TOOL_CHOICE_NONE))
    assert not are_parsed("none", "none", tools)
    assert are_parsed("none", "none", ChatPrompt(tools=[_F], tool_choice=TOOL_CHOICE_REQUIRED))
    assert are_parsed("none", "qwen3", ChatPrompt())
    assert are_parsed("openai", "none", ChatPrompt())
