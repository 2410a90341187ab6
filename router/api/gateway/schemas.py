"""The fields of requests: OpenAI's, and those that vLLM adds.

An unknown field is refused; a known one that would change nothing here is accepted and ignored. Lists and objects are
read up to the first error: pydantic keeps a kilobyte for each error, and clients send millions."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from configs.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS, PARAMETERS, Parameter
from router.intake.validation import MAX_CHAT_MESSAGES

# Prompts of one request: each is a stream of its own.
MAX_PROMPTS = 256
# Far above what models take; the served model's limit is checked later.
_MAX_TOKEN_IDS = 2**20
_MAX_PARTS, _MAX_TOOLS, _MAX_METADATA = 1024, 1024, 64

_Item = TypeVar("_Item")


def _at_most(limit: int) -> BeforeValidator:
    """Limits the entries of an object before its validation: pydantic would look at all of them first."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            counts = {"count": len(value), "limit": limit}
            raise PydanticCustomError("too_many", "it has {count} entries: use at most {limit}", counts)
        return value

    return BeforeValidator(check)


_TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=_MAX_TOKEN_IDS)]
_Prompts = Annotated[list[_Item], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class _Fields(BaseModel):
    """Treats null as unset: clients that list all fields send it for those they do not use."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object) -> object:
        """Returns the fields that are not null; of unknown ones only the first, which is enough for a refusal."""
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if name in cls.model_fields and value is not None}
        unknown = (name for name, value in fields.items() if name not in cls.model_fields and value is not None)
        for name in unknown:
            return {**given, name: None}
        return given


class StreamOptions(_Fields):
    include_usage: bool = False
    # Padding that hides lengths; never sent here.
    include_obfuscation: bool = False


def _number(parameter: Parameter) -> tuple[object, Any]:
    """Returns a parameter's type and default as a field. The router checks its range later."""
    bounds: dict[str, Any] = {"ge": -(2**31), "lt": 2**31} if parameter.kind is int else {}
    if parameter.from_model:
        return parameter.kind | None, Field(None, **bounds)
    return parameter.kind, Field(parameter.default, **bounds)


_numbers: dict[str, Any] = {each.name: _number(each) for each in PARAMETERS}
_Numbers = create_model("_Numbers", __base__=_Fields, **_numbers)


class SamplingRequest(_Numbers):
    """Fields of both calls, with all numbers of configs.sampling. None: the model's own default."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**32)
    logit_bias: Annotated[dict[int, float], _at_most(MAX_LOGIT_BIAS)] = Field(default_factory=dict)
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)

    # vLLM's fields.
    min_tokens: int = Field(0, ge=0, lt=2**32)
    stop_token_ids: list[int] = Field(default_factory=list, fail_fast=True, max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    session_key: str = ""

    # For OpenAI's own service; ignored here.
    user: str | None = None
    metadata: Annotated[dict[str, str], _at_most(_MAX_METADATA)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | _TokenIds | _Prompts[str] | _Prompts[_TokenIds]
    # OpenAI's default, unlike that of chats.
    max_tokens: int | None = Field(16, ge=1, lt=2**32)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    # Accepted only with values that change nothing.
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class FunctionCall(_Fields):
    name: str
    # JSON, as the model wrote it; templates see the object.
    arguments: str = ""


class ToolCall(_Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    # Part of a stream's pieces, kept by clients that join them.
    index: int | None = None


class Message(_Fields):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=_MAX_PARTS)] = ""

    # More fields, for templates that show them.
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=_MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    # vLLM's field.
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("no_content", "it has no content: only a message with tool_calls may omit it")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(_Fields):
    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(fail_fast=True, max_length=MAX_CHAT_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    # For the chat template, as they are; the model's calls are returned as text.
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # More variables for the chat template, as in vLLM.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
