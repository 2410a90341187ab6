"""The fields of Anthropic's requests; docs/http.md lists them."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from configs.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.api.gateway.openai.fields import HINT, Fields, at_most, known, no_effect, only, refused
from router.api.gateway.openai.request_fields import MESSAGES, schema_of
from router.request.chat import MAX_CHAT_MESSAGES
from router.request.features.tools import MAX_TOOLS

_MAX_BLOCKS, _MAX_METADATA = 1024, 64
_FOR_ANTHROPIC = no_effect("about Anthropic's own service")
_FOR_CACHE = no_effect("prefixes are cached without it")
# Fields that are known and not honoured, by object.
_BLOCK = {"cache_control": _FOR_CACHE, "citations": _FOR_ANTHROPIC}
_TOOL = {
    "cache_control": _FOR_CACHE,
    "input_examples": HINT,
    "eager_input_streaming": HINT,
    "defer_loading": HINT,
    "allowed_callers": HINT,
}
_RESULT = {
    "is_error": HINT,
    "signature": no_effect("thinking is not signed here"),
    "data": no_effect("encrypted by another server, which alone can read it"),
    "caller": _FOR_ANTHROPIC,
}
_THINKING = {"display": HINT}
_PROMPT = {
    "cache_control": _FOR_CACHE,
    "speed": _FOR_ANTHROPIC,
    "user_profile_id": _FOR_ANTHROPIC,
    "workspace_id": _FOR_ANTHROPIC,
    "context_management": refused("prompts are used as they are"),
    "mcp_servers": refused("this server calls no other ones"),
}
_MESSAGES = {
    "metadata": Annotated[_FOR_ANTHROPIC, at_most(_MAX_METADATA)],
    "service_tier": _FOR_ANTHROPIC,
    "inference_geo": _FOR_ANTHROPIC,
    "diagnostics": _FOR_ANTHROPIC,
    "container": refused("this server runs no code"),
}


class _Typed(Fields):
    """Refuses other types by name: their fields, which are unknown here, say nothing to the client."""

    # The fields that a block of a type needs.
    needed: ClassVar[dict[str, tuple[str, ...]]] = {"text": ("text",)}

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, block: object) -> object:
        if isinstance(block, dict):
            kind = block.get("type")
            if isinstance(kind, str) and kind not in cls.needed:
                words = {"type": repr(kind[:40]), "known": " and ".join(cls.needed)}
                raise PydanticCustomError("no_text", "type={type}: this API takes {known} only", words)
            for name in cls.needed.get(kind, ()) if isinstance(kind, str) else ():
                if block.get(name) is None:
                    words = {"type": kind, "name": name}
                    raise PydanticCustomError("no_text", "a block of type {type} needs {name}", words)
        return block


class TextBlock(known(_BLOCK, _Typed)):
    """A block of the system prompt."""

    type: str
    text: str = ""


_Text = str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=_MAX_BLOCKS)]


class Source(Fields):
    """An image's file in base64, or a URL to fetch it from."""

    type: Annotated[Literal["base64", "url"], only("base64", "url", why="there are no stored images")]
    media_type: str = ""
    data: str = ""
    url: str = ""

    @property
    def as_url(self) -> str:
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        name = "url" if self.type == "url" else "data"
        if not getattr(self, name):
            words = {"type": self.type, "name": name}
            raise PydanticCustomError("no_source", "a source of type {type} needs {name}", words)
        return self


class ResultBlock(known(_BLOCK, _Typed)):
    """A block of a tool's result."""

    needed: ClassVar[dict[str, tuple[str, ...]]] = {"text": ("text",), "image": ("source",)}

    type: str
    text: str = ""
    source: Source | None = None


_Result = str | Annotated[list[ResultBlock], Field(fail_fast=True, max_length=_MAX_BLOCKS)]


class Block(known(_BLOCK | _RESULT, _Typed)):
    """A block of a message's content."""

    needed: ClassVar[dict[str, tuple[str, ...]]] = {
        "text": ("text",),
        "image": ("source",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
        "thinking": ("thinking",),
        # Another server's, which only that one can read.
        "redacted_thinking": (),
    }

    type: str
    text: str = ""
    # A call that the assistant made.
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    # Its result.
    tool_use_id: str = ""
    content: _Result = ""
    # An image.
    source: Source | None = None
    # The text of a block of reasoning.
    thinking: str = ""


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=_MAX_BLOCKS)]


class Tool(known(_TOOL)):
    """A tool of the client's own."""

    type: str = "custom"
    name: str
    description: str = ""
    # A JSON schema.
    input_schema: dict[str, Any] = Field(default_factory=dict)
    # Calls follow the schema.
    strict: bool = False

    @model_validator(mode="after")
    def _is_the_clients(self) -> Self:
        if self.type != "custom":
            kind = {"type": repr(self.type[:40])}
            raise PydanticCustomError("no_tool", "type={type}: this server has no tools of its own, use custom", kind)
        if "input_schema" not in self.model_fields_set:
            raise PydanticCustomError("no_schema", "a tool needs input_schema")
        return self


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    # The function of type tool.
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(known(_THINKING)):
    # With "disabled" the answer has no thinking, if the model thinks nevertheless.
    type: Literal["enabled", "adaptive", "disabled"]
    # The reasoning's end is enforced after so many tokens.
    budget_tokens: int | None = Field(None, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _has_a_use_for_the_budget(self) -> Self:
        if self.budget_tokens is not None and self.type != "enabled":
            raise PydanticCustomError("no_budget", "budget_tokens goes with type=enabled: leave it out")
        return self


class OutputFormat(Fields):
    type: Annotated[Literal["json_schema"], only("json_schema", why="there is no other format")]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    # The template's reasoning_effort.
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(known(_PROMPT)):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    model: str = ""
    messages: list[Message] = Field(fail_fast=True, min_length=1, max_length=MAX_CHAT_MESSAGES)
    system: _Text = ""
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # The name of output_config.format in the API's beta.
    output_format: OutputFormat | None = None


class MessagesRequest(known(_MESSAGES, schema_of(MESSAGES, CountTokensRequest))):
    """POST /v1/messages."""

    # 0: none, to have the prompt's KV cached.
    max_tokens: int = Field(ge=0, lt=2**32)
    stream: bool = False
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
    ] = Field(default_factory=list)
