"""Converts a request's JSON to the message of gRPC."""

import json
from typing import Any

from pydantic_core import from_json

from configs.sampling import MAX_CHOICES, PARAMETERS
from protos import inference_pb2 as pb
from router.api.gateway.errors import BadRequestError
from router.api.gateway.schemas import ChatCompletionRequest, CompletionRequest, Message, SamplingRequest

# Fields of the same name in both.
_SAMPLING = (*(parameter.name for parameter in PARAMETERS), "max_tokens", "skip_special_tokens")
# Fields of a message that only templates use.
_FOR_TEMPLATES = {"name", "tool_calls", "tool_call_id", "reasoning_content"}


def completion_messages(request: CompletionRequest, request_id: str) -> list[pb.GenerateRequest]:
    """Returns a message for each prompt. Raises BadRequestError."""
    if request.best_of not in (None, request.n):
        raise BadRequestError(f"best_of={request.best_of}: only n={request.n} is possible", param="best_of")
    if request.echo and request.logprobs is not None:
        raise BadRequestError(
            "echo with logprobs: logprobs of the prompt are not in this API; ask for sampling.prompt_logprobs by gRPC",
            param="echo",
        )
    prompts = request.prompts
    if not prompts:
        raise BadRequestError("prompt is empty: give at least one", param="prompt")
    messages = []
    for index, prompt in enumerate(prompts):
        message = _message(request, request_id if len(prompts) == 1 else f"{request_id}-{index}", request.logprobs)
        if isinstance(prompt, str):
            message.prompt = prompt
        else:
            message.token_ids.ids.extend(_in_range(prompt, "prompt"))
            message.token_ids.SetInParent()
        messages.append(message)
    return messages


def chat_message(request: ChatCompletionRequest, request_id: str) -> pb.GenerateRequest:
    """Raises BadRequestError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequestError(f"top_logprobs={request.top_logprobs} needs logprobs=true", param="top_logprobs")
    message = _message(request, request_id, (request.top_logprobs or 0) if request.logprobs else None)
    if request.max_completion_tokens is not None:
        message.sampling.max_tokens = request.max_completion_tokens
    chat = message.chat
    chat.SetInParent()
    for index, each in enumerate(request.messages):
        chat.messages.add(role=each.role, content=each.text, fields_json=_fields(each, f"messages.{index}"))
    chat.add_generation_prompt = request.add_generation_prompt
    arguments = dict(request.chat_template_kwargs)
    if request.tools and request.tool_choice != "none":
        arguments["tools"] = request.tools
    if arguments:
        chat.template_arguments_json = json.dumps(arguments)
    return message


def _fields(message: Message, place: str) -> str:
    """Returns the fields that only templates use, as JSON. Raises BadRequestError."""
    fields = message.model_dump(include=_FOR_TEMPLATES, exclude_none=True)
    for index, call in enumerate(fields.get("tool_calls", ())):
        call.pop("index", None)
        function = call["function"]
        function["arguments"] = _arguments(function["arguments"], f"{place}.tool_calls.{index}.function.arguments")
    return json.dumps(fields) if fields else ""


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Parses a function call's arguments: templates take an object, and choose its form. Raises BadRequestError."""
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"{place} is not valid JSON: {error}", param="messages") from None
    if not isinstance(value, dict):
        raise BadRequestError(f"{place} is not a JSON object", param="messages")
    return value


def _message(request: SamplingRequest, request_id: str, logprobs: int | None) -> pb.GenerateRequest:
    if request.n > MAX_CHOICES:
        # Checked before anything is allocated for each choice.
        raise BadRequestError(f"n={request.n}: use 1 to {MAX_CHOICES}", param="n")
    sampling = pb.SamplingParams(
        n=request.n,
        min_tokens=request.min_tokens,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        stop_token_ids=_in_range(request.stop_token_ids, "stop_token_ids"),
        ignore_eos=request.ignore_eos,
    )
    for name in _SAMPLING:
        value = getattr(request, name)
        if value is not None:
            setattr(sampling, name, value)
    _in_range(list(request.logit_bias), "logit_bias")
    sampling.logit_bias.update(request.logit_bias)
    if logprobs is not None:
        sampling.logprobs = _in_range([logprobs], "logprobs")[0]
    if request.seed is not None:
        # Negative seeds are the other half of the 64 bits.
        sampling.seed = request.seed % 2**64
    return pb.GenerateRequest(
        request_id=request_id,
        model=request.model,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        session_key=request.session_key,
    )


def _in_range(numbers: list[int], param: str) -> list[int]:
    """Checks that a uint32 can hold the numbers; the model's limits are checked later. Raises BadRequestError."""
    for number in numbers:
        if not 0 <= number < 2**32:
            raise BadRequestError(f"{param}: {number} is not from 0 to {2**32 - 1}", param=param)
    return numbers
