"""A router's options and its model's template decide how outputs are parsed."""

from types import SimpleNamespace
from typing import Any

import pytest

from configs.options import Options
from protos.inference_pb2 import (
    TOOL_CHOICE_REQUIRED,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Resume,
    SamplingParams,
    Tool,
)
from router.errors import InvalidTools
from router.request.checks import checks_of_request
from router.request.outputs import Outputs

HARMONY = '"<|start|>assistant<|channel|>analysis<|message|>"'
QWEN = """<|im_start|> </think> '<tool_call>\\n{"name": "' '", "arguments": ' '}\\n</tool_call>'"""


def formats(template: str, calls: str = "auto", reasoning: str = "auto") -> tuple[str, str]:
    form = Outputs(SimpleNamespace(chat_template=template), calls, reasoning).form  # type: ignore[arg-type]
    return ("" if form.calls is None else form.calls.name, "" if form.reasoning is None else form.reasoning.name)


def test_options_come_before_guesses():
    assert formats(QWEN) == ("hermes", "qwen3")
    assert formats(QWEN, "none", "deepseek_r1") == ("", "deepseek_r1")
    assert formats(QWEN, "pythonic", "none") == ("pythonic", "")
    assert formats("") == ("", "")


def test_harmony_reads_calls_and_reasoning_in_one():
    assert formats(HARMONY) == ("openai", "")
    assert formats(HARMONY, "none") == ("openai", "")
    assert formats(QWEN, "auto", "openai_gptoss") == ("openai", "")
    # Calls of another format, named by the operator: the guess of harmony is wrong.
    assert formats(HARMONY, "hermes") == ("hermes", "")


def test_options_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="reasoning_parser=openai_gptoss with tool_call_parser=hermes"):
        Options(reasoning_parser="openai_gptoss", tool_call_parser="hermes")


def test_tools_that_are_too_large_to_enforce_are_refused_before_a_template_shows_them() -> None:
    form = Outputs(SimpleNamespace(chat_template=QWEN), "auto", "auto").form  # type: ignore[arg-type]
    large = Tool(name="f", parameters_json=f'{{"title": "{"x" * 300_000}"}}')
    chat = ChatPrompt(messages=[ChatMessage(role="user")], tools=[large], tool_choice=TOOL_CHOICE_REQUIRED)

    def check(**fields: Any) -> None:
        list(checks_of_request(GenerateRequest(**fields), set(), form))

    with pytest.raises(InvalidTools, match=r"their schemas have 300013 characters"):
        check(chat=chat)
    # A resume brings its constraint, and calls that need not follow a schema have none.
    check(chat=chat, resume=Resume(attempt=1, prompt_token_ids=[5]), sampling=SamplingParams(seed=1, max_tokens=1))
    chat.ClearField("tool_choice")
    check(chat=chat)
