"""The fields of OpenAI's requests, and those that vLLM 0.33 adds; docs/http.md lists them all."""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from configs.sampling import ALL_LOGPROBS
from router.api.gateway.openai.fields import FOR_MEDIA, FOR_OPENAI, HINT, Fields, at_most, known, refused
from router.api.gateway.openai.media import MEDIA, ImageUrl, IoKwargs, ProcessorKwargs, VideoUrl, check_media
from router.api.gateway.openai.request_fields import CHATS, schema_of
from router.api.gateway.openai.structured import ResponseFormat, StructuredOutputs
from router.api.gateway.openai.tools import ToolChoice, Tools
from router.request.chat import MAX_CHAT_MESSAGES

# Prompts of one request: each is a stream of its own.
MAX_PROMPTS = 256
# Far above what models take; the served model's limit is checked later.
_MAX_TOKEN_IDS = 2**20
_MAX_PARTS, _MAX_CALLS, _MAX_METADATA, _MAX_DOCUMENTS = 1024, 1024, 64, 1024
# Keys of a message beyond OpenAI's.
_MAX_EXTRAS = 64

_Item = TypeVar("_Item")
_NO_GUIDED = "use structured_outputs"


_TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=_MAX_TOKEN_IDS)]
_Prompts = Annotated[list[_Item], Field(fail_fast=True, max_length=MAX_PROMPTS)]
# -1: of all tokens.
_LogprobCount = Annotated[
    int, Field(ge=-1, lt=2**32), AfterValidator(lambda count: ALL_LOGPROBS if count == -1 else count)
]


class StreamOptions(Fields):
    include_usage: bool = False
    # vLLM's field: each chunk has the usage so far.
    continuous_usage_stats: bool = False
    # Padding that hides lengths; never sent here.
    include_obfuscation: bool = False


_NO_MEDIA = "this API takes text and images only"
# Fields that are known and not honoured, by request. The first ones have no effect; the others are refused.
_COMMON = {
    "user": FOR_OPENAI,
    "metadata": Annotated[FOR_OPENAI, at_most(_MAX_METADATA)],
    "store": FOR_OPENAI,
    "service_tier": FOR_OPENAI,
    "safety_identifier": FOR_OPENAI,
    "prompt_cache_key": FOR_OPENAI,
    "prompt_cache_retention": FOR_OPENAI,
    "mm_payload": FOR_MEDIA,
    "return_mm_kwargs": FOR_MEDIA,
    "spaces_between_special_tokens": HINT,
    "guided_json": refused(_NO_GUIDED),
    "guided_regex": refused(_NO_GUIDED),
    "guided_choice": refused(_NO_GUIDED),
    "guided_grammar": refused(_NO_GUIDED),
    "guided_decoding_backend": refused(_NO_GUIDED),
    "guided_whitespace_pattern": refused(_NO_GUIDED),
    "watermarking": refused("there are no watermarks"),
    "return_weight_versions": refused("weights have no versions"),
    "return_token_offsets": refused("use return_token_ids, or logprobs for each token's text"),
    "routed_experts_prompt_start": refused("routed experts are not returned"),
    "kv_transfer_params": refused("each replica computes whole requests"),
    "ec_transfer_params": refused("each replica computes whole requests"),
    "vllm_xargs": refused("there are no plugins that read it"),
}
_COMPLETION = {
    "prompt_embeds": refused(_NO_MEDIA),
}
_CHAT = {
    "prediction": HINT,
    "verbosity": HINT,
    "modalities": refused(_NO_MEDIA, ["text"]),
    "audio": refused(_NO_MEDIA),
    "functions": refused("use tools"),
    "function_call": refused("use tool_choice", "auto", "none"),
    "web_search_options": refused("there is no web search"),
}


class SamplingRequest(known(_COMMON, schema_of(CHATS))):
    """Fields of both calls, besides those of the table. None: the model's own default."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    response_format: ResponseFormat | None = None

    # vLLM's fields.
    structured_outputs: StructuredOutputs | None = None
    # The n best outputs of a beam search with n beams; the penalty is part of it.
    use_beam_search: bool = False
    length_penalty: float = 1.0
    echo: bool = False
    prompt_logprobs: _LogprobCount | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_interval: int = Field(1, ge=1)
    request_id: str = ""


class CompletionRequest(known(_COMPLETION), SamplingRequest):
    """POST /v1/completions."""

    prompt: str | _TokenIds | _Prompts[str] | _Prompts[_TokenIds]
    # Text behind the output, which fills the middle.
    suffix: str = ""
    # OpenAI's default, unlike that of chats.
    max_tokens: int | None = Field(16, ge=0, lt=2**32)
    logprobs: _LogprobCount | None = None
    best_of: int | None = Field(None, ge=1)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]


class Part(Fields):
    """A part of a message's content. OpenAI's and vLLM's clients send text without a type, too."""

    type: str = "text"
    text: str = ""
    refusal: str = ""
    # Clients send an image's URL bare, too.
    image_url: ImageUrl | str | None = None
    video_url: VideoUrl | None = None
    # Where a prefix to cache ends, in other APIs.
    cache_control: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        """An image's or a video's."""
        media = self.image_url if self.type == "image_url" else self.video_url
        return media if isinstance(media, str) else "" if media is None else media.url

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.type in MEDIA:
            check_media(self.type, getattr(self, self.type))
            return self
        if self.type not in ("text", "refusal", "input_text", "output_text"):
            raise PydanticCustomError("no_text", "type={type}: " + _NO_MEDIA, {"type": repr(self.type[:40])})
        name = "refusal" if self.type == "refusal" else "text"
        if name not in self.model_fields_set:
            raise PydanticCustomError(
                "no_text", "a part of type {type} needs {name}", {"type": self.type, "name": name}
            )
        return self


def image_part(url: str) -> Part:
    """Returns the part that an image of another API is."""
    return Part.model_construct(type="image_url", image_url=url)


class FunctionCall(Fields):
    name: str
    # The text of a JSON object, as the model wrote it.
    arguments: str = ""


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    # Part of a stream's pieces, kept by clients that join them.
    index: int | None = None


class Message(Fields):
    """Any other key is for the template, as is the name."""

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=_MAX_PARTS)] = ""

    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=_MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    # One of them is enough.
    reasoning: str | None = None
    reasoning_content: str | None = None

    keeps_unknown: ClassVar[bool] = True
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        extras = self.model_extra or {}
        if len(extras) > _MAX_EXTRAS:
            counts = {"count": len(extras), "limit": _MAX_EXTRAS}
            raise PydanticCustomError("too_many", "it has {count} keys of its own: use at most {limit}", counts)
        if "content" not in self.model_fields_set and not self.tool_calls and not extras:
            raise PydanticCustomError("no_content", "it has no content: only a message with tool_calls may omit it")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content)

    @property
    def has_media(self) -> bool:
        return not isinstance(self.content, str) and any(part.type in MEDIA for part in self.content)


class Chat(Fields):
    """The chat template's view of the message."""

    messages: list[Message] = Field(fail_fast=True, max_length=MAX_CHAT_MESSAGES)
    tools: Tools | None = None
    # In place of the model's own, if the router trusts its clients (option trust_request_chat_template).
    chat_template: str = ""
    # More variables for the template.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MAX_DOCUMENTS)] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # vLLM's fields for images and videos.
    mm_processor_kwargs: ProcessorKwargs | None = None
    media_io_kwargs: IoKwargs | None = None


class ChatCompletionRequest(known(_CHAT), Chat, SamplingRequest):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=0, lt=2**32)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: _LogprobCount | None = None
    return_prompt_text: bool = False


class BatchChatRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch, as in vLLM: several chats, answered together."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_CHAT_MESSAGES)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ]

    @property
    def chats(self) -> list[ChatCompletionRequest]:
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


class TokenizeRequest(Fields):
    """POST /tokenize of text."""

    model: str = ""
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeChatRequest(Chat):
    """POST /tokenize of a chat."""

    model: str = ""
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str = ""
    tokens: _TokenIds
