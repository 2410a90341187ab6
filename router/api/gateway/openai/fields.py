"""How fields of a request's JSON are read: null is nothing, unknown ones are noted, and some are known to do nothing.

Lists and objects are read up to the first error: pydantic keeps a kilobyte for each error, and clients send millions.
"""

import functools
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from router.api.gateway.errors import BadRequestError

_MOST_NOTED = 16


@dataclass(slots=True)
class Reading:
    """How a body is read, and what was left out; the context of pydantic's validation."""

    # Refuses unknown fields, option strict_fields.
    is_strict: bool = True
    # Names of unknown fields, the first ones.
    ignored: list[str] = field(default_factory=list)

    def note(self, name: str) -> None:
        if len(self.ignored) < _MOST_NOTED and name not in self.ignored:
            self.ignored.append(name)


class Fields(BaseModel):
    """Treats null as unset: clients that list all fields send it for those they do not use."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    # Unknown fields stay, in model_extra.
    keeps_unknown: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object, info: ValidationInfo) -> object:
        """Returns the fields that are not null; of unknown ones, if they are refused, only the first."""
        if not isinstance(fields, dict):
            return fields
        if cls.keeps_unknown:
            return {name: value for name, value in fields.items() if value is not None}
        reading = info.context if isinstance(info.context, Reading) else Reading()
        known = _names(cls)
        given = {name: value for name, value in fields.items() if name in known and value is not None}
        if len(given) == len(fields):
            return given
        for name, value in fields.items():
            if name not in known and value is not None:
                if reading.is_strict:
                    return {**given, name: None}
                reading.note(name)
        return given


@functools.cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names of a model's fields in JSON."""
    return frozenset(each.alias or name for name, each in model.model_fields.items())


def at_most(limit: int) -> BeforeValidator:
    """Limits the entries of an object before its validation: pydantic would look at all of them first."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            counts = {"count": len(value), "limit": limit}
            raise PydanticCustomError("too_many", "it has {count} entries: use at most {limit}", counts)
        return value

    return BeforeValidator(check)


def only(*values: str, why: str) -> BeforeValidator:
    """Refuses another text or object with the reason why."""

    def check(value: object) -> object:
        if isinstance(value, str | dict) and value not in values:
            raise PydanticCustomError("refused", "{why}", {"why": f"{why}: use {' or '.join(values)}"})
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class Effect:
    """The treatment of a field that is not honoured; kept in its metadata, for docs/http.md and /openapi.json."""

    # Why it changes nothing, or what is refused.
    says: str
    is_refused: bool

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The field's schema in /openapi.json."""
        text = f"Refused: {self.says}." if self.is_refused else f"No effect: {self.says}."
        return {**handler(core_schema), "description": text}


def no_effect(why: str) -> Any:
    return Annotated[Any, Effect(why, is_refused=False)]


def refused(what: str, *nothing: object) -> Any:
    """A field for something that is not there. It is refused, unless its value asks for nothing.

    nothing: such values, besides false, zero and empty ones.
    """

    def check(value: object) -> object:
        if value and value not in nothing:
            raise PydanticCustomError("refused", "{what}", {"what": what})
        return None

    return Annotated[Any, AfterValidator(check), Effect(what, is_refused=True)]


def known(kinds: dict[str, Any], base: type[Fields] = Fields) -> Any:
    """Returns a class with these fields, which are not honoured, besides those of base."""
    fields: dict[str, Any] = {name: (kind, None) for name, kind in kinds.items()}
    return create_model("_Known", __base__=base, **fields)


FOR_OPENAI = no_effect("about OpenAI's own service")
FOR_MEDIA = no_effect("about how vLLM passes images on")
HINT = no_effect("a hint that changes no token here")


def json_text(value: dict[str, Any], field: str) -> str:
    """Writes a value that a client sent, with its keys in their order. Raises BadRequestError."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise BadRequestError(f"{field} can't be written as JSON: {error}", param=field.partition(".")[0]) from None
