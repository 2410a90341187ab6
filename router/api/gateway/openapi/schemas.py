"""Schemas of requests, from the pydantic models that read them, as OpenAPI 3.0 writes them."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from configs.sampling import PARAMETERS
from router.api.gateway.openai.fields import Fields

REF = "#/components/schemas/{model}"
_QUALIFIED = re.compile(r"router__api__gateway__(\w+)__schemas__(\w+)")
_PARAMETERS = {each.name: f"{each.doc} Use {each.what_works}." for each in PARAMETERS}


def request_schemas(models: Sequence[type[Fields]]) -> dict[str, Any]:
    """Returns the schemas of the models and of all that they contain, by name."""
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    return {_short(name): _as_openapi(schema) for name, schema in found["$defs"].items()}


def _short(name: str) -> str:
    """Several APIs have a Message: they become openai.Message and anthropic.Message."""
    return _QUALIFIED.sub(r"\1.\2", name)


def _as_openapi(schema: Any) -> Any:
    """Converts JSON Schema of 2020 to that of OpenAPI 3.0. null is left out: it is the same as no field."""
    if isinstance(schema, list):
        return [_as_openapi(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "properties":
                made[key] = {name: _field(name, each) for name, each in value.items()}
            case "anyOf":
                kinds = [_as_openapi(each) for each in value if each != {"type": "null"}]
                made |= kinds[0] if len(kinds) == 1 else {key: kinds}
            case "$ref":
                made[key] = _short(value)
            case "const":
                made["enum"] = [value]
            case "exclusiveMinimum" | "exclusiveMaximum":
                # A number in 2020, a flag beside the bound in OpenAPI 3.0.
                made[key.replace("exclusiveM", "m")] = value
                made[key] = True
            case "default" if value is None:
                pass
            case "additionalProperties" if value is False:
                # Unknown fields are ignored, unless the option strict_fields refuses them.
                pass
            case "title":
                pass
            case _:
                made[key] = _as_openapi(value)
    if "$ref" in made and len(made) > 1:
        # What stands beside a reference is ignored.
        made["allOf"] = [{"$ref": made.pop("$ref")}]
    return made


def _field(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    made = _as_openapi(schema)
    if name in _PARAMETERS:
        made.setdefault("description", _PARAMETERS[name])
    return made
