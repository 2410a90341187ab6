"""The form of the answer to a request."""

from dataclasses import dataclass, replace

from router.api.gateway.openai.schemas import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)
from router.api.gateway.openai.structured import constraint_field

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    # Choices of each prompt, and how many of them, the best, are shown.
    num_choices: int = 1
    num_shown: int = 1
    is_stream: bool = False
    # The usage comes last; each chunk has the usage so far.
    has_usage_chunk: bool = False
    has_running_usage: bool = False
    # Likely tokens beside each token; None: no logprobs.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    has_token_ids: bool = False
    # Logprobs name tokens by id.
    has_ids_for_tokens: bool = False
    # The prompt comes first.
    has_echo: bool = False
    # One token is computed, and none is shown: max_tokens=0.
    drops_output: bool = False
    # Tokens of a chunk, but for the last one.
    stream_interval: int = 1
    # The field that says what the output must be, for errors; empty: none does.
    constraint_field: str = ""
    # The schema of the tool at {}, for errors.
    schema_field: str = "tools.{}.function.parameters"
    # A chat's: who speaks, what of the last message comes first, and whether the rendered prompt is shown.
    role: str = ASSISTANT
    echoed: str = ""
    has_prompt_text: bool = False
    # Chunks have deltas.
    is_parsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm(Form):
    """The form of several chats."""

    chats: tuple[Form, ...] = ()


def batch_form(request: BatchChatRequest) -> BatchForm:
    chats = tuple(map(chat_form, request.chats))
    field = constraint_field(request.response_format, request.structured_outputs)
    return BatchForm(chats=chats, has_prompt_text=request.return_prompt_text, constraint_field=field)


def parsed(form: Form) -> Form:
    """Returns the form of an output that is parsed."""
    if isinstance(form, BatchForm):
        return replace(form, chats=tuple(map(parsed, form.chats)))
    return replace(form, is_parsed=True)


def completion_form(request: CompletionRequest) -> Form:
    return Form(
        **_common(request),
        num_choices=request.n if request.use_beam_search else max(request.n, request.best_of or 1),
        num_logprobs=request.logprobs,
        has_echo=request.echo,
        drops_output=request.max_tokens == 0,
    )


def chat_form(request: ChatCompletionRequest) -> Form:
    last = request.messages[-1] if request.messages else None
    role = ASSISTANT if request.add_generation_prompt or last is None else last.role
    return Form(
        **_common(request),
        num_choices=request.n,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        drops_output=0 in (request.max_tokens, request.max_completion_tokens),
        role=role,
        echoed=last.text if request.echo and last is not None and last.role == role else "",
        has_prompt_text=request.return_prompt_text,
    )


def _common(request: SamplingRequest) -> dict:
    options = request.stream_options
    return {
        "num_shown": request.n,
        "is_stream": request.stream,
        "has_usage_chunk": options is not None and options.include_usage,
        "has_running_usage": options is not None and options.include_usage and options.continuous_usage_stats,
        "num_prompt_logprobs": request.prompt_logprobs,
        "has_token_ids": request.return_token_ids,
        "has_ids_for_tokens": request.return_tokens_as_token_ids,
        "stream_interval": request.stream_interval,
        "constraint_field": constraint_field(request.response_format, request.structured_outputs),
    }
