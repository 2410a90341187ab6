"""The tools of a request as parsers need them: which types the arguments of a function have."""

import ast
import json
from collections.abc import Mapping, Sequence
from functools import cached_property

from protos.inference_pb2 import Tool
from router.parsing.json_text import as_json, is_unicode
from runtime.grammar.json_text import finite_json, json_object

# Python's own parser takes a hundred times the space of what it reads.
_MAX_LITERAL_CHARS = 16 * 1024

_PYTHON_WORDS = {"none": "null", "true": "true", "false": "false"}


class Tools:
    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    @cached_property
    def _properties(self) -> dict[str, Mapping[str, object]]:
        return {tool.name: _properties(tool.parameters_json) for tool in self._tools}

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self._tools)

    def types(self, function: str, argument: str) -> frozenset[str]:
        """Returns the JSON types that the function's schema allows for an argument; empty if it does not say."""
        return _types(self._properties.get(function, {}).get(argument))


def _properties(schema_json: str) -> Mapping[str, object]:
    try:
        properties = json_object(schema_json or "{}", "parameters_json").get("properties")
    except ValueError:
        return {}
    return properties if isinstance(properties, dict) else {}


def _types(schema: object, depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > 4:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_type_of, values))
    branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list):
        types = [_types(branch, depth + 1) for branch in branches]
        return frozenset().union(*types) if all(types) else frozenset()
    return frozenset()


def _type_of(value: object) -> str:
    # bool before int: True is both.
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def typed_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument that a format writes without its type.

    It is what the text says as JSON or as a Python literal, if that has one of the types; otherwise the text itself as
    a string. types: empty: any but a string.
    """
    stripped = text.strip()
    for read in (_json, _python):
        value = read(stripped)
        if value is not None and _fits(value[1], types):
            return value[0]
    return f'"{as_json(text)}"'


def _json(text: str) -> tuple[str, object] | None:
    try:
        return text, finite_json(text)
    except ValueError:
        return None


def _python(text: str) -> tuple[str, object] | None:
    if len(text) > _MAX_LITERAL_CHARS:
        return None
    if word := _PYTHON_WORDS.get(text.lower()):
        return word, json.loads(word)
    if not text.startswith(("{", "[")):
        return None
    try:
        value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=not is_unicode(text), allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return (written, value) if is_unicode(written) else None


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    if not types:
        return kind != "string"
    return kind in types or (kind == "integer" and "number" in types)
