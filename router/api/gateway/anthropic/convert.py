"""Converts Anthropic's requests to those of chats."""

import json
from collections.abc import Sequence
from typing import Any

from router.api.gateway.anthropic.schemas import (
    Block,
    CountTokensRequest,
    Message,
    MessagesRequest,
    ResultBlock,
    TextBlock,
    Tool,
)
from router.api.gateway.openai import schemas as openai
from router.api.gateway.openai import tools as functions
from router.api.gateway.openai.request_fields import MESSAGES, names_of
from router.api.gateway.openai.schemas import ChatCompletionRequest, TokenizeChatRequest
from router.api.gateway.openai.structured import JsonSchema, ResponseFormat

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(request: MessagesRequest) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_construct(
        **_prompt_of(request),
        **_choice_of(request),
        **{name: getattr(request, name) for name in names_of(MESSAGES)},
        include_reasoning=request.thinking is None or request.thinking.type != "disabled",
        thinking_token_budget=None if request.thinking is None else request.thinking.budget_tokens,
        stream=request.stream,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        response_format=_format_of(request),
    )


def tokenized_chat_of(request: CountTokensRequest) -> TokenizeChatRequest:
    return TokenizeChatRequest.model_construct(**_prompt_of(request))


def _prompt_of(request: CountTokensRequest) -> dict[str, Any]:
    """Returns a chat's fields. Both requests have been validated: limits and types are the same."""
    turns = [turn for each in request.messages for turn in _turns_of(each)]
    if request.system:
        turns.insert(0, _turn("system", _text_of(request.system)))
    has_tools = request.tool_choice is None or request.tool_choice.type != "none"
    return {
        "model": request.model,
        "messages": turns,
        "tools": [_function_of(tool) for tool in request.tools] if has_tools else None,
        "reasoning_effort": None if request.output_config is None else request.output_config.effort,
        # The client has begun the answer itself.
        "continue_final_message": request.messages[-1].role == "assistant",
    }


def _format_of(request: MessagesRequest) -> ResponseFormat | None:
    own = None if request.output_config is None else request.output_config.format
    asked = own or request.output_format
    if asked is None:
        return None
    schema = JsonSchema.model_construct(name="output", schema_=asked.schema_)
    return ResponseFormat.model_construct(type=asked.type, json_schema=schema)


def _choice_of(request: MessagesRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        name = functions.FunctionName.model_construct(name=choice.name)
        return fields | {"tool_choice": functions.NamedTool.model_construct(function=name)}
    return fields | {"tool_choice": _CHOICES[choice.type]}


def _turns_of(message: Message) -> list[openai.Message]:
    """Returns a message as chat templates know it: each result of a tool is one of its own, where it stands."""
    if isinstance(message.content, str):
        return [_turn(message.role, message.content)]
    turns: list[openai.Message] = []
    said: list[Block] = []
    for block in message.content:
        if block.type != "tool_result":
            said.append(block)
            continue
        if said:
            turns.append(_said(message.role, said))
            said = []
        content = block.content if isinstance(block.content, str) else _content(block.content)
        turns.append(_turn("tool", content, tool_call_id=block.tool_use_id))
    if said or not turns:
        turns.append(_said(message.role, said))
    return turns


def _said(role: str, blocks: list[Block]) -> openai.Message:
    calls = [
        openai.ToolCall.model_construct(
            id=block.id,
            function=openai.FunctionCall.model_construct(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            ),
        )
        for block in blocks
        if block.type == "tool_use"
    ]
    reasoning = "".join(block.thinking for block in blocks)
    return _turn(role, _content(blocks), tool_calls=calls or None, reasoning=reasoning or None)


def _content(blocks: Sequence[Block | ResultBlock]) -> str | list[openai.Part]:
    """Returns what blocks say: text, or parts if there are images."""
    if all(block.type != "image" for block in blocks):
        return "".join(block.text for block in blocks)
    parts: list[openai.Part] = []
    for block in blocks:
        if block.type == "image" and block.source is not None:
            parts.append(openai.image_part(block.source.as_url))
        elif block.text:
            parts.append(openai.Part.model_construct(type="text", text=block.text))
    return parts


def _turn(role: str, content: str | list[openai.Part], **fields: Any) -> openai.Message:
    return openai.Message.model_construct(role=role, content=content, **fields)


def _text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _function_of(tool: Tool) -> functions.Tool:
    function = functions.Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return functions.Tool.model_construct(function=function)
