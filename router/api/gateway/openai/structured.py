"""The form of an output: OpenAI's response_format and vLLM's structured_outputs become constraints of gRPC."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from protos.inference_pb2 import Alternatives, Constraint
from router.api.gateway.errors import BadRequestError
from router.api.gateway.openai.fields import Effect, Fields, json_text, only, refused

_MAX_CHOICES, _MAX_TAGS = 1024, 1024
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_NO_OTHER = "there is no other format"
_UNSEEN = Effect("a part of a format that the model does not see", is_refused=False)


class JsonSchema(Fields):
    name: str
    description: Annotated[Any, _UNSEEN] = None
    schema_: dict[str, Any] = Field(alias="schema")
    # Outputs follow the schema in any case.
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"], only(*_FORMATS, why="there is no other format")
    ]
    json_schema: JsonSchema | None = None
    # vLLM's: a structural tag of today's form, or of the one before.
    format: dict[str, Any] | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MAX_TAGS)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True, max_length=_MAX_TAGS)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("no_schema", "type=json_schema needs json_schema")
        if self.type == "structural_tag" and (self.format is None) == (self.structures is None):
            raise PydanticCustomError("no_tag", "type=structural_tag needs format, or structures and triggers")
        return self


class StructuredOutputs(Fields):
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=_MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: refused("whitespace has no pattern of its own: use disable_any_whitespace") = None  # type: ignore[valid-type]

    @property
    def kinds(self) -> list[str]:
        """The names of the kinds that are set."""
        given = {
            "json": self.json_ is not None,
            "regex": self.regex is not None,
            "choice": self.choice is not None,
            "grammar": self.grammar is not None,
            "json_object": self.json_object,
            "structural_tag": self.structural_tag is not None,
        }
        return [name for name, is_given in given.items() if is_given]


def constraint_field(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> str:
    """Returns the field that says what the output must be, for errors; empty: none does."""
    if response_format is not None and response_format.type != "text":
        return "response_format.json_schema" if response_format.type == "json_schema" else "response_format"
    if structured is None:
        return ""
    return ".".join(["structured_outputs", *structured.kinds[:1]])


def constraint_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Constraint | None:
    """Returns None if any output will do. Raises BadRequestError."""
    kinds = [] if structured is None else [f"structured_outputs.{kind}" for kind in structured.kinds]
    if response_format is not None and response_format.type != "text":
        kinds.append("response_format")
    if len(kinds) > 1:
        raise BadRequestError(f"{' and '.join(kinds)} are set: use one of them", param=kinds[0].partition(".")[0])
    if not kinds:
        if structured is None:
            return None
        raise BadRequestError(
            "structured_outputs has no kind: set json, regex, choice, grammar, json_object or structural_tag",
            param="structured_outputs",
        )
    made = Constraint() if structured is None else _of_structured(structured)
    if response_format is not None and response_format.type != "text":
        made.MergeFrom(_of_format(response_format))
    return made


def _of_format(asked: ResponseFormat) -> Constraint:
    """Raises BadRequestError."""
    if asked.type == "json_schema":
        assert asked.json_schema is not None
        return Constraint(json_schema=json_text(asked.json_schema.schema_, "response_format.json_schema.schema"))
    if asked.type == "json_object":
        return Constraint(json_object=True)
    tag = asked.model_dump(include={"type", "format", "structures", "triggers"}, exclude_unset=True)
    return Constraint(structural_tag=json_text(tag, "response_format"))


def _of_structured(asked: StructuredOutputs) -> Constraint:
    """Raises BadRequestError."""
    made = Constraint(
        disable_any_whitespace=asked.disable_any_whitespace,
        disable_additional_properties=asked.disable_additional_properties,
    )
    schema = asked.json_
    if schema is not None:
        made.json_schema = schema if isinstance(schema, str) else json_text(schema, "structured_outputs.json")
    elif asked.regex is not None:
        made.regex = asked.regex
    elif asked.choice is not None:
        made.choice.CopyFrom(Alternatives(texts=asked.choice))
    elif asked.grammar is not None:
        made.grammar = asked.grammar
    elif asked.json_object:
        made.json_object = True
    elif asked.structural_tag is not None:
        made.structural_tag = asked.structural_tag
    return made
