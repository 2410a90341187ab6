"""Arguments that are no JSON, as formats of a structural tag: Qwen3-Coder's blocks of parameters.

A block has a parameter's text without quotes, up to the next mark. So a schema is exact here if its strings are any
text, or some texts, and strings within lists and objects have none of the marks.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_ABOUT = frozenset({"description", "title", "default", "examples", "$schema"})
_OF_ARGUMENTS = _ABOUT | {"type", "properties", "required", "additionalProperties"}
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_MARKS = ("<parameter=", "</parameter>", "<function=", "</function>", "<tool_call>", "</tool_call>")
_KEY = re.compile(r"[^<>\s](?:[^<>\n]{0,254}[^<>\s])?")
_END = "\n</parameter>\n"

Format = dict[str, Any]


class InexactError(ValueError):
    """The message says what has no exact form."""


def any_parameters() -> Format:
    """Blocks that follow no schema. It goes before an end."""
    return {"type": "any_text", "excludes": ["<function=", "</function>", "<tool_call>", "</tool_call>"]}


def parameters(schema: Mapping[str, Any]) -> Format:
    """Returns the blocks of arguments that follow a schema, in its order. Raises InexactError."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if unknown := sorted(schema.keys() - _OF_ARGUMENTS):
        raise InexactError(unknown[0])
    if not isinstance(properties, dict) or not isinstance(required, list) or schema.get("type", "object") != "object":
        raise InexactError("a schema that is not an object's")
    if missing := [key for key in required if key not in properties]:
        raise InexactError(f"{missing[0]!r:.80}, which is required and not among the properties,")
    blocks = [_block(key, value) for key, value in properties.items()]
    elements = [
        block if key in required else {"type": "optional", "content": block}
        for key, block in zip(properties, blocks, strict=True)
    ]
    return {"type": "sequence", "elements": elements} if elements else {"type": "const_string", "value": ""}


def _block(key: str, schema: Any) -> Format:
    if not _KEY.fullmatch(key):
        raise InexactError(f"the property {key!r:.80}")
    begin = f"<parameter={key}>\n"
    if not isinstance(schema, dict):
        raise InexactError(f"the schema of {key!r}")
    if schema.get("type") == "string" and not schema.keys() - _ABOUT - {"type"}:
        content: Format = {"type": "any_text", "excludes": list(_MARKS)}
    elif (texts := _texts(schema)) is not None:
        content = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    elif _has_no_mark(schema):
        content = {"type": "json_schema", "json_schema": schema}
    else:
        raise InexactError(f"the schema of {key!r}")
    return {"type": "tag", "begin": begin, "content": content, "end": _END}


def _texts(schema: dict[str, Any]) -> list[str] | None:
    """The values of a schema that has texts alone."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if schema.get("type", "string") != "string" or schema.keys() - _ABOUT - {"type", "enum", "const"}:
        return None
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        return None
    return None if any(mark in each for each in values for mark in _MARKS) else values


def _has_no_mark(schema: Any) -> bool:
    """Says if no JSON that follows the schema has a mark in it, nor is a string."""
    if not isinstance(schema, dict):
        return False
    named = schema.get("type")
    types = frozenset([named] if isinstance(named, str) else named if isinstance(named, list) else [])
    if types and types <= _SCALARS:
        return True
    if named == "array":
        return schema.keys() <= _ABOUT | {"type", "items", "minItems", "maxItems"} and _is_inner(schema.get("items"))
    if named == "object":
        properties = schema.get("properties", {})
        return (
            schema.keys() <= _OF_ARGUMENTS
            and schema.get("additionalProperties") is False
            and isinstance(properties, dict)
            and all("<" not in key and _is_inner(value) for key, value in properties.items())
        )
    values = schema.get("enum")
    return isinstance(values, list) and all(isinstance(each, bool | int | float | None) for each in values)


def _is_inner(schema: Any) -> bool:
    """Says the same within a list or an object, where strings have quotes."""
    if isinstance(schema, dict) and _texts(schema) is not None:
        return "<" not in json.dumps(schema)
    return _has_no_mark(schema)
