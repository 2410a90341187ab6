"""Converts a request for a response to gRPC's message, by way of a chat completion."""

from dataclasses import dataclass, field
from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.openai import tools as functions
from router.api.gateway.openai.convert import chat_message
from router.api.gateway.openai.form import ASSISTANT, Form
from router.api.gateway.openai.request_fields import RESPONSES, names_of
from router.api.gateway.openai.schemas import ChatCompletionRequest, FunctionCall, Message, Part, ToolCall, image_part
from router.api.gateway.openai.structured import JsonSchema, ResponseFormat
from router.api.gateway.responses.schemas import (
    WITH_LOGPROBS,
    Format,
    Item,
    NamedTool,
    ResponseRequest,
    SomeTools,
    Tool,
)

# Fields of the same name and meaning in both.
_SHARED = (*names_of(RESPONSES), "model", "stream", "parallel_tool_calls")
# Chat templates know no developers.
_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseForm(Form):
    # Fields of the request that the answer shows.
    shown: dict[str, Any] = field(default_factory=dict)
    # The response to continue; empty: none.
    previous: str = ""
    is_stored: bool = True
    # The first message is the instructions.
    has_instructions: bool = False


def response_message(request: ResponseRequest, request_id: str) -> pb.GenerateRequest:
    """Returns the message without the conversation before it. Raises BadRequestError."""
    fields = {name: getattr(request, name) for name in _SHARED if name in request.model_fields_set}
    messages = _messages(request.items)
    if request.instructions:
        messages.insert(0, _said("system", request.instructions))
    if request.tools:
        fields["tools"] = list(map(_chat_tool, request.tools))
    if request.tool_choice is not None:
        fields["tool_choice"] = _chat_choice(request.tool_choice)
    if request.max_output_tokens is not None:
        fields["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if (asked := _format(request)) is not None:
        fields["response_format"] = _chat_format(asked)
    if _has_logprobs(request):
        fields.update(logprobs=True, top_logprobs=request.top_logprobs or 0)
    return chat_message(ChatCompletionRequest.model_construct(messages=messages, **fields), request_id)


def response_form(request: ResponseRequest) -> ResponseForm:
    effort = None if request.reasoning is None else request.reasoning.effort
    asked = _format(request)
    choice = request.tool_choice
    shown = {
        "instructions": request.instructions or None,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id or None,
        "reasoning": {"effort": effort, "summary": None},
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_unset=True)},
        "tool_choice": choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in request.tools],
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": request.truncation,
    }
    return ResponseForm(
        is_stream=request.stream,
        num_logprobs=(request.top_logprobs or 0) if _has_logprobs(request) else None,
        constraint_field="" if asked is None else "text.format",
        schema_field="tools.{}.parameters",
        shown=shown,
        previous=request.previous_response_id,
        is_stored=request.store,
        has_instructions=bool(request.instructions),
    )


def _has_logprobs(request: ResponseRequest) -> bool:
    return request.top_logprobs is not None or WITH_LOGPROBS in request.include


def _format(request: ResponseRequest) -> Format | None:
    """Returns what the output must be; None: any text."""
    asked = None if request.text is None else request.text.format
    return None if asked is None or asked.type == "text" else asked


def _chat_format(asked: Format) -> ResponseFormat:
    if asked.schema_ is None or asked.type != "json_schema":
        return ResponseFormat.model_construct(type=asked.type)
    schema = JsonSchema.model_construct(name=asked.name, schema_=asked.schema_)
    return ResponseFormat.model_construct(type=asked.type, json_schema=schema)


def _messages(items: list[Item]) -> list[Message]:
    """Returns items as chat templates know them: reasoning, an answer and the calls behind it are one message."""
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages and messages[-1].role == ASSISTANT else None
        is_open = last is not None and not last.content and last.tool_calls is None
        match item.type:
            case "message" if last is not None and is_open and item.role == ASSISTANT:
                last.content = _content(item)
            case "message":
                role = item.role or ""
                messages.append(_said(_ROLES.get(role, role), _content(item)))
            case "reasoning" if last is not None and is_open:
                last.reasoning = (last.reasoning or "") + item.text
            case "reasoning":
                messages.append(_said(ASSISTANT, "", reasoning=item.text))
            case "function_call":
                if last is None:
                    last = _said(ASSISTANT, "")
                    messages.append(last)
                function = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
                last.tool_calls = [
                    *(last.tool_calls or ()),
                    ToolCall.model_construct(id=item.call_id, function=function),
                ]
            case "function_call_output":
                messages.append(_said("tool", _content(item), tool_call_id=item.call_id))
    return messages


def _said(role: str, content: str | list[Part], **fields: Any) -> Message:
    return Message.model_construct(role=role, content=content, **fields)


def _content(item: Item) -> str | list[Part]:
    """Returns what an item says as a chat's message has it."""
    said = item.said
    if isinstance(said, str) or all(part.type != "input_image" for part in said):
        return item.text
    return [
        image_part(part.image_url) if part.type == "input_image" else Part.model_construct(type="text", text=part.text)
        for part in said
    ]


def _chat_tool(tool: Tool) -> functions.Tool:
    function = functions.Function.model_construct(
        name=tool.name, description=tool.description or "", parameters=tool.parameters, strict=bool(tool.strict)
    )
    return functions.Tool.model_construct(function=function)


def _chat_choice(choice: NamedTool | SomeTools | str) -> functions.NamedTool | functions.SomeTools | str:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, NamedTool):
        return _chat_name(choice)
    allowed = functions.AllowedTools.model_construct(mode=choice.mode, tools=list(map(_chat_name, choice.tools)))
    return functions.SomeTools.model_construct(allowed_tools=allowed)


def _chat_name(tool: NamedTool) -> functions.NamedTool:
    return functions.NamedTool.model_construct(function=functions.FunctionName.model_construct(name=tool.name))
