"""The constraint that makes an output's calls follow the tools' schemas, as a structural tag in xgrammar's format.

Of that format these are used: tag, triggered_tags, tags_with_separator, sequence, star, or, const_string, any_text and
json_schema.
"""

import json

from protos.inference_pb2 import (
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_REQUIRED,
    ChatPrompt,
    Constraint,
    Tool,
)
from router.errors import InvalidConstraint
from router.parsing.families import JSON_LIST, Markup, ToolFormat
from router.parsing.parameters import InexactError, any_parameters, parameters
from router.parsing.parser import tools_in_use
from runtime.grammar.engine import MAX_TEXT_BYTES, ConstraintError
from runtime.grammar.json_text import json_object, read_json

# More are not a constraint without their whitespace, either.
_MOST_CHARS = 4 * MAX_TEXT_BYTES
# Schemas with one of these say themselves what they are; without, arguments are an object.
_TYPED = ("type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const")


class UnenforceableError(ValueError):
    """The family's format has no grammar for what is asked."""


def tool_constraint(form: ToolFormat | None, chat: ChatPrompt, answer: Constraint | None = None) -> Constraint | None:
    """Returns what makes the calls of an output follow the chat's tools; None if nothing does.

    Required: one call at least, named: one of this function, each with arguments that follow the schema; nothing else.
    Auto: where a call begins; only if a tool is strict or only some may be called, and only arguments of strict tools
    follow their schema.
    With parallel_tool_calls=false there is one call at most. form: None: the model writes no calls by itself.

    answer: what the answer must be, one for which `is_json_answer` is true. A call that must come leaves no answer;
    with auto the output is either calls or this answer.

    Raises UnenforceableError, InvalidConstraint, and ValueError for a tool's schema that is not the text of a JSON
    object.
    """
    tools = tools_in_use(chat)
    enforced = _enforced(form, chat)
    is_limited = bool(tools) and bool(chat.allowed_tool_names) and form is not None
    has_answer = answer is not None and bool(tools) and form is not None and form.markup is not None
    if not (enforced or is_limited or has_answer):
        return None
    check_schemas_size(form, chat)
    only_one = chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    if _must_call(chat):
        markup = form.markup if form is not None and form.markup is not None else JSON_LIST.markup
        assert markup is not None
        only_one |= chat.tool_choice == TOOL_CHOICE_NAMED
        tags = [_tag(markup, tools[index], follows_schema=True) for index in enforced]
        return _constraint(_around(markup, _calls(markup, tags, only_one=only_one)), markup.after)
    assert form is not None
    if form.parameters_markup is not None and answer is None:
        return _with_parameters(form, form.parameters_markup, chat, only_one=only_one)
    if form.markup is None:
        which, other = ("allowed", "allow all") if chat.allowed_tool_names else ("strict", "tools that are not strict")
        raise UnenforceableError(
            f"{which} tools with tool_choice auto: no grammar can make calls in the format {form.name}; "
            f"use tool_choice required, or {other}"
        )
    markup = form.markup
    tags = [_tag(markup, tool, follows_schema=tool.strict) for tool in tools if _is_allowed(chat, tool)]
    if answer is not None:
        content = _json_format(answer)
        if markup.answer:
            content = {"type": "tag", "begin": markup.answer, "content": content, "end": ""}
        calls = _around(markup, _calls(markup, tags, only_one=only_one))
        constraint = _constraint({"type": "or", "elements": [calls, content]}, markup.after)
        constraint.disable_any_whitespace = answer.disable_any_whitespace
        constraint.disable_additional_properties = answer.disable_additional_properties
        return constraint
    if markup.preambles:
        return _constraint(_in_channels(markup, _calls(markup, tags, only_one=only_one)))
    if markup.first:
        tags = [_around(markup, _calls(markup, tags, only_one=only_one))]
    return _constraint(
        {"type": "triggered_tags", "triggers": [markup.trigger], "tags": tags, "stop_after_first": only_one}
    )


def _with_parameters(form: ToolFormat, markup: Markup, chat: ChatPrompt, *, only_one: bool) -> Constraint:
    """Raises UnenforceableError."""
    tags: list[dict[str, object]] = []
    for tool in tools_in_use(chat):
        if not _is_allowed(chat, tool):
            continue
        try:
            content = parameters(_schema(tool)) if tool.strict else any_parameters()
        except InexactError as error:
            raise UnenforceableError(
                f"tool {tool.name} is strict, and {error} has no exact grammar in the format {form.name}; use "
                "tool_choice required, or tools that are not strict"
            ) from None
        tags.append({"begin": markup.open + tool.name + markup.middle, "content": content, "end": markup.close})
    return _constraint(
        {
            "type": "triggered_tags",
            "triggers": [markup.trigger],
            "tags": [{"type": "tag", **tag} for tag in tags],
            "excludes": list(markup.not_in_text),
            "stop_after_first": only_one,
        }
    )


def check_schemas_size(form: ToolFormat | None, chat: ChatPrompt) -> None:
    """Raises UnenforceableError if tool_constraint() refuses the chat's tools for their size."""
    tools = tools_in_use(chat)
    size = sum(len(tools[index].parameters_json) for index in _enforced(form, chat))
    if size > _MOST_CHARS:
        raise UnenforceableError(f"their schemas have {size} characters: a constraint takes {MAX_TEXT_BYTES} bytes")


def enforced_schemas(form: ToolFormat | None, chat: ChatPrompt) -> dict[int, str]:
    """Returns the schemas that an output with tool_constraint() follows, by the places of their tools in the chat."""
    return {index: json.dumps(_schema(chat.tools[index])) for index in _enforced(form, chat)}


def _must_call(chat: ChatPrompt) -> bool:
    return chat.tool_choice in (TOOL_CHOICE_REQUIRED, TOOL_CHOICE_NAMED)


def _enforced(form: ToolFormat | None, chat: ChatPrompt) -> list[int]:
    """The places of the tools whose arguments follow their schema."""
    is_named, must_call = chat.tool_choice == TOOL_CHOICE_NAMED, _must_call(chat)
    if form is None and not must_call:
        return []
    return [
        index
        for index, tool in enumerate(tools_in_use(chat))
        if (must_call or tool.strict) and (not is_named or tool.name == chat.tool_name) and _is_allowed(chat, tool)
    ]


def _is_allowed(chat: ChatPrompt, tool: Tool) -> bool:
    return not chat.allowed_tool_names or tool.name in chat.allowed_tool_names


def _constraint(form: dict[str, object], after: str = "") -> Constraint:
    return Constraint(structural_tag=json.dumps({"type": "structural_tag", "format": form}), after=after)


def is_json_answer(constraint: Constraint) -> bool:
    """True for JSON that begins at once. Calls can take the place of such an answer."""
    return constraint.WhichOneof("kind") in ("json_schema", "json_object") and not constraint.after


def _json_format(answer: Constraint) -> dict[str, object]:
    if answer.WhichOneof("kind") == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    try:
        # As an answer's schema is read where there are no tools.
        return {"type": "json_schema", "json_schema": read_json(answer.json_schema, "json_schema")}
    except ConstraintError as error:
        raise InvalidConstraint(str(error), "json_schema") from None


def _calls(markup: Markup, tags: list[dict[str, object]], *, only_one: bool) -> dict[str, object]:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": markup.separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def _in_channels(markup: Markup, calls: dict[str, object]) -> dict[str, object]:
    """Calls or an answer, behind any number of preambles."""
    # A parser would read these in a text, too.
    text = {"type": "any_text", "excludes": list(markup.not_in_text)}
    preambles = [
        {"type": "tag", "begin": each, "content": text, "end": markup.preamble_end} for each in markup.preambles
    ]
    answer = {"type": "sequence", "elements": [{"type": "const_string", "value": markup.answer}, text]}
    before = {"type": "star", "content": {"type": "or", "elements": preambles}}
    return {"type": "sequence", "elements": [before, {"type": "or", "elements": [calls, answer]}]}


def _around(markup: Markup, calls: dict[str, object]) -> dict[str, object]:
    if not markup.first:
        return calls
    return {"type": "tag", "begin": markup.first, "content": calls, "end": markup.last}


def _tag(markup: Markup, tool: Tool, *, follows_schema: bool) -> dict[str, object]:
    schema = _schema(tool) if follows_schema else {"type": "object"}
    return {
        "type": "tag",
        "begin": markup.open + tool.name + markup.middle,
        "content": {"type": "json_schema", "json_schema": schema},
        "end": markup.close,
    }


def _schema(tool: Tool) -> dict[str, object]:
    schema = json_object(tool.parameters_json or "{}", f"parameters_json of tool {tool.name}")
    return schema if any(key in schema for key in _TYPED) else {**schema, "type": "object"}
