"""Converts a request's JSON to the message of gRPC."""

from configs.sampling import LARGEST_LENGTH_PENALTY, MAX_BEAM_WIDTH, MAX_CHOICES
from protos import inference_pb2 as pb
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.fields import json_text
from router.api.gateway.openai.media import image_of, video_of
from router.api.gateway.openai.request_fields import in_range, put_fields
from router.api.gateway.openai.schemas import (
    BatchChatRequest,
    Chat,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    SamplingRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from router.api.gateway.openai.structured import constraint_of
from router.api.gateway.openai.tools import add_tools
from runtime.grammar.json_text import json_object


def completion_messages(request: CompletionRequest, request_id: str) -> list[pb.GenerateRequest]:
    """Returns a message for each prompt. Raises BadRequestError."""
    best_of = request.best_of or request.n
    if best_of < request.n:
        raise BadRequestError(f"best_of={best_of}: use at least n, which is {request.n}", param="best_of")
    if best_of > request.n and request.stream:
        raise BadRequestError(f"best_of={best_of} with stream: the best is known at the end only", param="best_of")
    if request.suffix and request.echo:
        raise BadRequestError("suffix with echo: the prompt is not shown if its middle is filled in", param="suffix")
    prompts = request.prompts
    if not prompts:
        raise BadRequestError("prompt is empty: give at least one", param="prompt")
    logprobs, prompt_logprobs = request.logprobs, request.prompt_logprobs
    if request.use_beam_search:
        if request.stream:
            raise BadRequestError("stream with use_beam_search: the best is known at the end only", param="stream")
        if request.echo and logprobs is not None:
            raise BadRequestError("echo and logprobs with use_beam_search: leave one of them out", param="echo")
    elif best_of > request.n:
        logprobs = logprobs or 0
    if request.logprob_token_ids:
        if request.logprobs is None:
            raise BadRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if request.echo and request.max_tokens == 0:
            raise BadRequestError(
                "logprob_token_ids with echo and max_tokens=0: there are no output tokens", param="logprob_token_ids"
            )
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    messages = []
    for index, prompt in enumerate(prompts):
        own_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        message = _message(request, own_id, best_of, logprobs, prompt_logprobs)
        message.suffix = request.suffix
        if isinstance(prompt, str):
            message.prompt = prompt
        else:
            message.token_ids.ids.extend(in_range(prompt, "prompt"))
            message.token_ids.SetInParent()
        messages.append(message)
    return messages


def batch_messages(request: BatchChatRequest, request_id: str) -> list[pb.GenerateRequest]:
    """Returns a message for each chat. Raises BadRequestError."""
    if request.stream:
        raise BadRequestError("stream=true: a batch of chats is answered whole", param="stream")
    chats = request.chats
    if len(chats) == 1:
        return [chat_message(chats[0], request_id)]
    return [chat_message(chat, f"{request_id}-{index}") for index, chat in enumerate(chats)]


def chat_message(request: ChatCompletionRequest, request_id: str) -> pb.GenerateRequest:
    """Raises BadRequestError."""
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError(f"top_logprobs={request.top_logprobs} needs logprobs=true", param="top_logprobs")
    if request.logprob_token_ids and not request.logprobs:
        raise BadRequestError("logprob_token_ids needs logprobs=true", param="logprob_token_ids")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    message = _message(request, request_id, request.n, logprobs, request.prompt_logprobs)
    if request.max_completion_tokens is not None:
        message.sampling.max_tokens = request.max_completion_tokens or 1
    message.chat.CopyFrom(_chat(request))
    if request.mm_processor_kwargs is not None:
        message.item_options.CopyFrom(request.mm_processor_kwargs.options())
    add_tools(message.chat, request.tools, request.tool_choice, request.parallel_tool_calls)
    if not request.include_reasoning:
        message.include_reasoning = False
    return message


def tokenize_message(request: TokenizeRequest | TokenizeChatRequest) -> pb.TokenizeRequest:
    """Raises BadRequestError."""
    message = pb.TokenizeRequest(model=request.model)
    if request.add_special_tokens is not None:
        message.add_special_tokens = request.add_special_tokens
    if isinstance(request, TokenizeRequest):
        message.prompt = request.prompt
    else:
        if request.mm_processor_kwargs is not None and request.mm_processor_kwargs.options().ByteSize():
            raise BadRequestError(
                "mm_processor_kwargs: tokens are counted with the server's own", param="mm_processor_kwargs"
            )
        message.chat.CopyFrom(_chat(request))
        add_tools(message.chat, request.tools)
    return message


def detokenize_message(request: DetokenizeRequest) -> pb.DetokenizeRequest:
    """Raises BadRequestError."""
    return pb.DetokenizeRequest(model=request.model, token_ids=in_range(request.tokens, "tokens"))


def _chat(request: Chat) -> pb.ChatPrompt:
    """Returns a chat without its tools. Raises BadRequestError."""
    continues = request.continue_final_message
    if continues and "add_generation_prompt" in request.model_fields_set and request.add_generation_prompt:
        raise BadRequestError(
            "continue_final_message is set, and add_generation_prompt, too: use one of them",
            param="continue_final_message",
        )
    chat = pb.ChatPrompt(
        add_generation_prompt=request.add_generation_prompt and not continues, continue_final_message=continues
    )
    for index, each in enumerate(request.messages):
        chat.messages.add(
            role=each.role,
            content="" if each.has_media else each.text,
            parts=_parts(each, f"messages.{index}", request) if each.has_media else (),
            fields_json=_fields(each),
            tool_calls=_calls(each, f"messages.{index}"),
            tool_call_id=each.tool_call_id or "",
            reasoning=each.reasoning or each.reasoning_content or "",
        )
    arguments = dict(request.chat_template_kwargs)
    # vLLM takes a template from there, too.
    template = arguments.pop("chat_template", None) or ""
    if not isinstance(template, str):
        raise BadRequestError("chat_template_kwargs.chat_template is not a string", param="chat_template_kwargs")
    chat.chat_template = request.chat_template or template
    if request.documents is not None:
        arguments["documents"] = request.documents
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    if arguments:
        chat.template_arguments_json = json_text(arguments, "chat_template_kwargs")
    return chat


def _parts(message: Message, place: str, request: Chat) -> list[pb.ContentPart]:
    """Raises BadRequestError."""
    parts: list[pb.ContentPart] = []
    rate = 0.0 if request.media_io_kwargs is None else request.media_io_kwargs.frames_per_second
    for index, part in enumerate(() if isinstance(message.content, str) else message.content):
        where = f"{place}.content.{index}.{part.type}.url"
        if part.type == "image_url":
            parts.append(pb.ContentPart(item=pb.Item(image=image_of(part.url, where))))
        elif part.type == "video_url":
            parts.append(pb.ContentPart(item=pb.Item(video=video_of(part.url, rate, where))))
        else:
            parts.append(pb.ContentPart(text=part.text or part.refusal))
    return parts


def _fields(message: Message) -> str:
    """Returns the fields that only templates know, as JSON."""
    fields = dict(message.model_extra or {})
    if message.name is not None:
        fields["name"] = message.name
    return json_text(fields, "messages") if fields else ""


def _calls(message: Message, place: str) -> list[pb.ToolCall]:
    """Raises BadRequestError."""
    calls: list[pb.ToolCall] = []
    for index, call in enumerate(message.tool_calls or ()):
        function = call.function
        _check_arguments(function.arguments, f"{place}.tool_calls.{index}.function.arguments")
        calls.append(pb.ToolCall(id=call.id or "", name=function.name, arguments=function.arguments))
    return calls


def _check_arguments(text: str, place: str) -> None:
    """Checks a function call's arguments: templates take an object, and choose its form. Raises BadRequestError."""
    try:
        json_object(text or "{}", place)
    except ValueError as error:
        raise BadRequestError(str(error), param="messages") from None


def _message(
    request: SamplingRequest, request_id: str, n: int, logprobs: int | None, prompt_logprobs: int | None
) -> pb.GenerateRequest:
    if n > MAX_CHOICES:
        # Checked before anything is allocated for each choice.
        raise BadRequestError(f"n={n}: use 1 to {MAX_CHOICES}", param="n")
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequestError(
            "prompt_logprobs with stream: they come with a whole answer only, or over gRPC", param="prompt_logprobs"
        )
    message = pb.GenerateRequest(request_id=request_id, model=request.model, sampling=pb.SamplingParams(n=n))
    put_fields(message, request)
    sampling = message.sampling
    if (constraint := constraint_of(request.response_format, request.structured_outputs)) is not None:
        sampling.constraint.CopyFrom(constraint)
    if request.max_tokens is not None and not sampling.HasField("max_tokens"):
        # A completion's default.
        sampling.max_tokens = request.max_tokens
    if logprobs is not None and not sampling.logprob_token_ids:
        sampling.logprobs = in_range([logprobs], "logprobs")[0]
    if prompt_logprobs is not None:
        sampling.prompt_logprobs = in_range([prompt_logprobs], "prompt_logprobs")[0]
    if request.use_beam_search:
        _add_search(message, request, n)
    return message


def _add_search(message: pb.GenerateRequest, request: SamplingRequest, width: int) -> None:
    """Raises BadRequestError."""
    if width > MAX_BEAM_WIDTH:
        name = "n" if width == request.n else "best_of"
        raise BadRequestError(f"{name}={width} with use_beam_search: use 1 to {MAX_BEAM_WIDTH}", param=name)
    if not abs(request.length_penalty) <= LARGEST_LENGTH_PENALTY:
        raise BadRequestError(
            f"length_penalty={request.length_penalty:g}: use a number in "
            f"[-{LARGEST_LENGTH_PENALTY}, {LARGEST_LENGTH_PENALTY}]",
            param="length_penalty",
        )
    message.sampling.n = request.n
    message.beam_search.width = width
    message.beam_search.length_penalty = request.length_penalty
