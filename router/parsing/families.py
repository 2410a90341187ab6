"""The formats of calls by the names that users know, which are vLLM's, and what grammars need of each.

A model's formats are guessed from its chat template, which shows calls and reasoning as the model writes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from router.parsing.deltas import Deltas, call_id, short_call_id
from router.parsing.formats.deepseek import deepseek
from router.parsing.formats.gemma import Gemma
from router.parsing.formats.harmony import harmony
from router.parsing.formats.marked_json import json_list, llama_json, marked_json
from router.parsing.formats.mistral import mistral
from router.parsing.formats.pythonic import pythonic
from router.parsing.formats.qwen_coder import qwen_coder
from router.parsing.source import Reading, Source
from router.parsing.tools import Tools

# The first entry whose marks are all in the template says the format. Special marks come before plain ones.
_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>", '<|"|>')),
    ("functiongemma", ("<start_function_call>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("phi4_mini_json", ("functools",)),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("granite4", ("<|start_of_role|>", "</tool_call>")),
    ("granite", ("<|start_of_role|>", "tool_call")),
    ("hermes", ("<tool_call>", "</tool_call>", '"arguments"')),
    ("hermes", ("<tool_call>", "</tool_call>", "'arguments'")),
    ("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("llama3_json", ("<|header_start|>", '"parameters": ')),
)
_REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("granite", ("<|start_of_role|>", "Here is my thought process")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("<|im_start|>", "</think>")),
    ("deepseek_r1", ("<think>", "</think>")),
)


def guess_tool_call_parser(template: str) -> str:
    """Returns the name of the format of calls; empty if the template shows none that is known."""
    return _guess(_CALLS, template)


def guess_reasoning_parser(template: str) -> str:
    """Returns the name of the format of reasoning; empty if the template shows none."""
    return _guess(_REASONING, template)


def _guess(formats: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    # Templates write quotes inside of strings with backslashes.
    plain = template.replace("\\", "")
    return next((name for name, marks in formats if all(mark in plain for mark in marks)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """How a family writes calls, for grammars: first, then open NAME middle ARGUMENTS close for each, then last."""

    open: str
    middle: str
    close: str
    separator: str
    first: str = ""
    last: str = ""
    # What a call begins with wherever it stands in the text.
    trigger: str
    # What comes before the calls where one must come; empty: nothing.
    after: str = ""
    # What an answer begins with, at the same place as calls.
    answer: str = ""
    # Texts before calls or an answer: how they begin, how each ends, and the marks that none may contain. Empty: any
    # text may come.
    preambles: tuple[str, ...] = ()
    preamble_end: str = ""
    not_in_text: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    read: Callable[[Source, Deltas, Tools], Reading[None]]
    # The marks that a call begins with, as far as it has such.
    marks: tuple[str, ...] = ()
    # Some of its marks are special tokens, so the text must keep those (skip_special_tokens: false).
    keeps_special_tokens: bool = True
    # None: arguments are not JSON, so where a call must come it is JSON_LIST's.
    markup: Markup | None = None
    # For calls with auto alone, whose arguments are blocks of parameters (router.parsing.parameters).
    parameters_markup: Markup | None = None
    # Another way to write calls, and the mark by which a template shows that its model does.
    other_markup: tuple[str, Markup] | None = None
    id_of: Callable[[str, int, int], str] = call_id

    def for_template(self, template: str) -> "ToolFormat":
        """Returns the format as a chat template shows it."""
        if self.other_markup is None or self.other_markup[0] not in template:
            return self
        return replace(self, markup=self.other_markup[1], other_markup=None)


def _object_markup(begin: str, end: str, separator: str, *, arguments: str = "arguments") -> Markup:
    opening = begin + '{"name": "'
    return Markup(
        open=opening,
        middle=f'", "{arguments}": ',
        close="}" + end,
        separator=separator,
        trigger=begin.strip() or opening,
    )


def _list_markup(mark: str, *, arguments: str = "arguments") -> Markup:
    return Markup(
        first=mark + "[",
        open='{"name": "',
        middle=f'", "{arguments}": ',
        close="}",
        separator=", ",
        last="]",
        # "functools" alone is a word.
        trigger=mark if mark.endswith(("]", ">")) else mark + "[",
    )


def _deepseek_markup(before_name: str, before_arguments: str, behind_arguments: str, separator: str) -> Markup:
    return Markup(
        first="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>" + before_name,
        middle=before_arguments,
        close=behind_arguments + "<｜tool▁call▁end｜>",
        separator=separator,
        last="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    )


_TOOL_CALL, _TOOL_CALL_TOKEN = "<tool_call>", "<|tool_call|>"
_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_V3 = _deepseek_markup("function" + _SEPARATOR, "\n```json\n", "\n```", "\n")
_DEEPSEEK_V31 = _deepseek_markup("", _SEPARATOR, "", "")
_HERMES = _object_markup(_TOOL_CALL + "\n", "\n</tool_call>", "\n")
# Since tokenizer version 11 (mistral-common, integrations/chat_templates).
_MISTRAL_ARGS = Markup(open="[TOOL_CALLS]", middle="[ARGS]", close="", separator="", trigger="[TOOL_CALLS]")
_HARMONY = Markup(
    open="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    close="",
    separator="<|call|><|start|>assistant",
    trigger="<|channel|>commentary to=functions.",
    # The analysis comes first.
    after="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    preambles=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
    preamble_end="<|end|><|start|>assistant",
    not_in_text=("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"),
)

_QWEN_CODER = Markup(
    open=_TOOL_CALL + "\n<function=",
    middle=">\n",
    close="</function>\n</tool_call>",
    separator="\n",
    trigger=_TOOL_CALL,
    # Its parser takes this for a call, too.
    not_in_text=("<function=",),
)

# The format for calls that must come, in families without one that a grammar can make; as vLLM's for all.
JSON_LIST = ToolFormat(
    name="json_list", read=json_list, keeps_special_tokens=False, markup=_list_markup("", arguments="parameters")
)

_hermes = marked_json((_TOOL_CALL,), ("</tool_call>",))
_granite = marked_json((_TOOL_CALL, _TOOL_CALL_TOKEN), ("</tool_call>",))
_phi = marked_json(("functools[", _TOOL_CALL_TOKEN), ("<|/tool_call|>",))

TOOL_FORMATS = {
    form.name: form
    for form in (
        ToolFormat(name="hermes", read=_hermes, marks=(_TOOL_CALL,), markup=_HERMES),
        ToolFormat(
            name="llama3_json",
            read=llama_json,
            marks=("<|python_tag|>",),
            keeps_special_tokens=False,
            markup=_object_markup("", "", "; ", arguments="parameters"),
        ),
        ToolFormat(name="llama4_pythonic", read=pythonic, marks=("<|python_start|>",)),
        ToolFormat(name="pythonic", read=pythonic, keeps_special_tokens=False),
        ToolFormat(
            name="mistral",
            read=mistral,
            marks=("[TOOL_CALLS]",),
            markup=_list_markup("[TOOL_CALLS]"),
            other_markup=("[ARGS]", _MISTRAL_ARGS),
            id_of=short_call_id,
        ),
        ToolFormat(name="deepseek_v3", read=deepseek, marks=("<｜tool▁calls▁begin｜>",), markup=_DEEPSEEK_V3),
        ToolFormat(name="deepseek_v31", read=deepseek, marks=("<｜tool▁calls▁begin｜>",), markup=_DEEPSEEK_V31),
        ToolFormat(
            name="functiongemma",
            read=Gemma("<start_function_call>", "<end_function_call>", "<escape>"),
            marks=("<start_function_call>",),
        ),
        ToolFormat(name="gemma4", read=Gemma("<|tool_call>", "<tool_call|>", '<|"|>'), marks=("<|tool_call>",)),
        ToolFormat(
            name="granite", read=_granite, marks=(_TOOL_CALL, _TOOL_CALL_TOKEN), markup=_list_markup(_TOOL_CALL_TOKEN)
        ),
        ToolFormat(name="granite4", read=_hermes, marks=(_TOOL_CALL,), markup=_HERMES),
        ToolFormat(name="phi4_mini_json", read=_phi, marks=("functools[",), markup=_list_markup("functools")),
        ToolFormat(name="openai", read=harmony, markup=_HARMONY),
        ToolFormat(
            name="qwen3_coder", read=qwen_coder, marks=(_TOOL_CALL, "<function="), parameters_markup=_QWEN_CODER
        ),
    )
}
