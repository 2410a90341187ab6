"""Checks the tools of a chat. Every message names the field, the value seen and what would work."""

import re

from protos.inference_pb2 import (
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    ToolChoice,
)
from router.errors import InvalidRequest, InvalidTools
from router.parsing.families import ToolFormat
from router.parsing.grammar import UnenforceableError, check_schemas_size
from runtime.grammar.json_text import json_object

MAX_TOOLS = 1024
# Bytes of all tools together, and of all calls in a chat's messages.
MAX_TOOLS_BYTES = 2**20

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_tools(chat: ChatPrompt) -> None:
    """Raises InvalidRequest."""
    tools, choice = chat.tools, chat.tool_choice
    if choice not in ToolChoice.values():
        raise InvalidRequest(f"chat.tool_choice={choice}: use one of {', '.join(ToolChoice.keys())}")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"chat.tools has {len(tools)} entries: use at most {MAX_TOOLS}")
    if choice == TOOL_CHOICE_REQUIRED and not tools:
        raise InvalidRequest("chat.tool_choice asks for a call, and chat.tools is empty: give at least one tool")
    if chat.tool_name and choice != TOOL_CHOICE_NAMED:
        raise InvalidRequest(f"chat.tool_name={chat.tool_name!r:.140}: it goes with TOOL_CHOICE_NAMED; leave it empty")
    if choice == TOOL_CHOICE_NAMED and all(tool.name != chat.tool_name for tool in tools):
        raise InvalidRequest(f"chat.tool_name={chat.tool_name!r:.140} is not among chat.tools: use the name of one")
    if chat.allowed_tool_names:
        _check_allowed(chat)
    if (num_bytes := sum(tool.ByteSize() for tool in tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"chat.tools has {num_bytes} bytes: at most {MAX_TOOLS_BYTES} are allowed")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        field = f"chat.tools[{i}]"
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"{field}.name={tool.name!r:.140}: use 1 to 128 letters, digits, underscores, hyphens and dots"
            )
        if tool.name in seen:
            raise InvalidRequest(f"{field}.name={tool.name!r} comes twice: give each tool once")
        seen.add(tool.name)
        if tool.parameters_json:
            _check_object(tool.parameters_json, f"{field}.parameters_json")


def check_size(message: GenerateRequest, form: ToolFormat | None) -> None:
    """Refuses tools that are too large for a constraint, before a template has shown them. form: of the served model's
    calls. Raises InvalidTools."""
    try:
        check_schemas_size(form, message.chat)
    except UnenforceableError as error:
        raise InvalidTools(str(error)) from None


def check_calls(message: ChatMessage, field: str) -> int:
    """Checks the calls in a message, and returns their bytes; their arguments are parsed when the template gets them.
    field: the message's. Raises InvalidRequest."""
    num_bytes = 0
    for k, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidRequest(f"{field}.tool_calls[{k}].name is empty: give the function's name")
        num_bytes += call.ByteSize()
    return num_bytes


def _check_allowed(chat: ChatPrompt) -> None:
    choice = chat.tool_choice
    if choice in (TOOL_CHOICE_NONE, TOOL_CHOICE_NAMED):
        raise InvalidRequest(
            f"chat.allowed_tool_names is set with {ToolChoice.Name(choice)}: it goes with TOOL_CHOICE_AUTO and "
            "TOOL_CHOICE_REQUIRED; leave it out"
        )
    known = {tool.name for tool in chat.tools}
    if unknown := [name for name in chat.allowed_tool_names if name not in known]:
        raise InvalidRequest(
            f"chat.allowed_tool_names has {unknown[0]!r:.140}, which is not among chat.tools: use their names"
        )


def _check_object(text: str, field: str) -> None:
    try:
        json_object(text, field)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
