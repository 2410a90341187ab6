"""The tools of a request, and which of them the model has to call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protos import inference_pb2 as pb
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.fields import Fields, json_text, only
from router.request.features.tools import MAX_TOOLS

_CHOICES = {
    None: pb.TOOL_CHOICE_UNSPECIFIED,
    "none": pb.TOOL_CHOICE_NONE,
    "auto": pb.TOOL_CHOICE_AUTO,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


class Function(Fields):
    name: str
    description: str = ""
    # A JSON schema. None: any object.
    parameters: dict[str, Any] | None = None
    # Arguments follow the schema.
    strict: bool = False


class Tool(Fields):
    type: Annotated[Literal["function"], only("function", why="there are no tools of other types")] = "function"
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """The function that the model has to call."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class SomeTools(Fields):
    """The functions that the model may call, of those that the template shows."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: object) -> str:
    """Tells which of the types of a tool_choice is meant, so that errors are about that one alone."""
    if isinstance(value, str):
        return _WORD
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": _NAMED, "allowed_tools": _SOME}.get(kind, "") if isinstance(kind, str) else ""


# No identifiers: errors leave them out of a field's place.
_WORD, _NAMED, _SOME = "a word", "a function", "some functions"
CHOICE_OF = Discriminator(
    kind_of_choice,
    custom_error_type="choice",
    custom_error_message="use none, auto, required, the name of a function or allowed_tools",
)
Word = Annotated[Literal["none", "auto", "required"], Tag(_WORD)]
Named, Some = Tag(_NAMED), Tag(_SOME)

Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Annotated[Word | Annotated[NamedTool, Named] | Annotated[SomeTools, Some], CHOICE_OF]


def add_tools(
    chat: pb.ChatPrompt,
    tools: Sequence[Tool] | None,
    choice: NamedTool | SomeTools | str | None = None,
    parallel_tool_calls: bool | None = None,
) -> None:
    """Raises BadRequestError."""
    for index, tool in enumerate(tools or ()):
        function = tool.function
        place = f"tools.{index}.function.parameters"
        schema = "" if function.parameters is None else json_text(function.parameters, place)
        chat.tools.add(
            name=function.name, description=function.description, parameters_json=schema, strict=function.strict
        )
    if isinstance(choice, NamedTool):
        chat.tool_choice, chat.tool_name = pb.TOOL_CHOICE_NAMED, choice.function.name
    elif isinstance(choice, SomeTools):
        chat.tool_choice = _CHOICES[choice.allowed_tools.mode]
        chat.allowed_tool_names.extend(tool.function.name for tool in choice.allowed_tools.tools)
    else:
        chat.tool_choice = _CHOICES[choice]
    if chat.tool_choice in (pb.TOOL_CHOICE_REQUIRED, pb.TOOL_CHOICE_NAMED) or chat.allowed_tool_names:
        _check_named(chat)
    if parallel_tool_calls is not None:
        chat.parallel_tool_calls = parallel_tool_calls


def _check_named(chat: pb.ChatPrompt) -> None:
    if not chat.tools:
        raise BadRequestError("tool_choice asks for a call, and there are no tools: give some", param="tool_choice")
    known = {tool.name for tool in chat.tools}
    for name in (*chat.allowed_tool_names, *filter(None, [chat.tool_name])):
        if name not in known:
            raise BadRequestError(
                f"tool_choice: {name[:140]!r} is not among the tools: use the name of one", param="tool_choice"
            )
