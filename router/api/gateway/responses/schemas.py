"""The fields of a request for a response; docs/http.md lists them."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from router.api.gateway.openai.fields import FOR_OPENAI, Effect, Fields, at_most, known, no_effect, refused
from router.api.gateway.openai.request_fields import RESPONSES, schema_of
from router.api.gateway.openai.schemas import StreamOptions
from router.api.gateway.openai.tools import CHOICE_OF, Named, Some, Word
from router.request.chat import MAX_CHAT_MESSAGES
from router.request.features.tools import MAX_TOOLS

# In `include`, asks for logprobs.
WITH_LOGPROBS = "message.output_text.logprobs"
_MAX_PARTS, _MAX_METADATA, _MAX_INCLUDED = 1024, 64, 64
_UNSEEN = Effect("a part of an item that the model does not see", is_refused=False)
_HINT = Effect("a hint that changes no token here", is_refused=False)
_PART = {"file_id": refused("there are no stored images: use image_url")}


class _Typed(Fields):
    """An object with a type. Another type is refused by its name, before its other fields are looked at."""

    @model_validator(mode="before")
    @classmethod
    def _of_known_type(cls, fields: object) -> object:
        if isinstance(fields, dict):
            told = fields.get("type", cls.model_fields["type"].default)
            known = get_args(cls.model_fields["type"].annotation)
            if not isinstance(told, str) or told not in known:
                words = {"type": repr(told)[:60], "known": " or ".join(known)}
                raise PydanticCustomError("unknown_type", "type={type} is not supported: use {known}", words)
        return fields


class Part(known(_PART, _Typed)):
    """A part of a message's content, of a call's result or of reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "input_image"]
    text: str = ""
    # An image: a data: URI, or a URL to fetch from.
    image_url: str = ""
    detail: Annotated[Any, _HINT] = None
    # A client sends the parts of an answer back as they came.
    annotations: Annotated[Any, _UNSEEN] = None
    logprobs: Annotated[Any, _UNSEEN] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        name = "image_url" if self.type == "input_image" else "text"
        if name not in self.model_fields_set:
            words = {"type": self.type, "name": name}
            raise PydanticCustomError("incomplete", "a part of type {type} needs {name}", words)
        return self


_Parts = Annotated[list[Part], Field(fail_fast=True, max_length=_MAX_PARTS)]


class Item(_Typed):
    """A message, a call, its result, or reasoning. Clients may leave out the type of a message."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    # What a message says, or a reasoning item.
    content: str | _Parts = ""
    # A call and its result.
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | _Parts = ""
    summary: Annotated[Any, _UNSEEN] = None
    encrypted_content: Annotated[Any, _UNSEEN] = None
    id: Annotated[Any, _UNSEEN] = None
    status: Annotated[Any, _UNSEEN] = None
    phase: Annotated[Any, _UNSEEN] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in _NEEDED[self.type]:
            if name not in self.model_fields_set:
                words = {"type": self.type, "name": name}
                raise PydanticCustomError("incomplete", "an item of type {type} needs {name}", words)
        return self

    @property
    def said(self) -> str | list[Part]:
        return self.output if self.type == "function_call_output" else self.content

    @property
    def text(self) -> str:
        return self.said if isinstance(self.said, str) else "".join(part.text for part in self.said)


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Tool(_Typed):
    """A function, with its fields beside its type; chat templates get them in the form of chat completions."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # Calls follow the schema.
    strict: bool | None = None


class NamedTool(_Typed):
    """The function that the model has to call."""

    type: Literal["function"]
    name: str


class SomeTools(_Typed):
    """The functions that the model may call, of those that the template shows."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[Word | Annotated[NamedTool, Named] | Annotated[SomeTools, Some], CHOICE_OF]


class Format(_Typed):
    """The form of the output. A schema stands beside its name here."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    # Outputs follow the schema in any case.
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and not (self.name and self.schema_ is not None):
            raise PydanticCustomError("no_schema", "type=json_schema needs name and schema")
        return self


class TextOptions(Fields):
    format: Format | None = None
    verbosity: Annotated[Any, _HINT] = None


class Reasoning(Fields):
    # A variable of the chat template.
    effort: str | None = None
    summary: Annotated[Any, _HINT] = None
    generate_summary: Annotated[Any, _HINT] = None


_NOT_HONOURED = {
    "user": FOR_OPENAI,
    "service_tier": FOR_OPENAI,
    "safety_identifier": FOR_OPENAI,
    "prompt_cache_key": FOR_OPENAI,
    "prompt_cache_retention": FOR_OPENAI,
    "max_tool_calls": no_effect("about tools that the server runs"),
    "background": refused("a response is computed while its client waits: use stream"),
    "conversation": refused("use previous_response_id"),
    "prompt": refused("there are no stored prompts: use instructions and input"),
}


class ResponseRequest(known(_NOT_HONOURED, schema_of(RESPONSES))):
    """POST /v1/responses."""

    model: str = ""
    input: str | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_CHAT_MESSAGES)]
    instructions: str = ""
    previous_response_id: str = ""
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**32)
    top_logprobs: int | None = Field(None, ge=0, lt=2**32)
    include: list[str] = Field(default_factory=list, fail_fast=True, max_length=_MAX_INCLUDED)
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA)] = Field(default_factory=dict)
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    # vLLM's field.
    request_id: str = ""

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input
