"""What requests hold: OpenAI's fields, and those that vLLM adds.

A field that is not known here is refused; one that would change nothing here is taken and left alone."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool = False
    # Padding that hides lengths: there is none here.
    include_obfuscation: bool = False


class SamplingRequest(BaseModel):
    """Both calls have these. None: as the model's own defaults say."""

    model_config = _STRICT

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**32)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)

    # As vLLM has them.
    top_k: int | None = Field(None, ge=-(2**31), lt=2**31)
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = Field(0, ge=0, lt=2**32)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    session_key: str = ""

    # Of OpenAI's own service.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    # OpenAI's default, unlike that of chats.
    max_tokens: int | None = Field(16, ge=1, lt=2**32)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    # Neither of these does anything else here.
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


class TextPart(BaseModel):
    model_config = _STRICT

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = _STRICT

    role: str
    content: str | list[TextPart]
    # Templates of the models served do not show it.
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(BaseModel):
    model_config = _STRICT

    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    # For the chat template, as they are; what the model says to call them is text.
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # More variables for the chat template, as vLLM has them.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
