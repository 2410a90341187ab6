"""Rewrites keywords that the library lacks into equivalent ones that it has.

A keyword whose meaning depends on the instance is not rewritten; canonical.py refuses it by name.
"""

from collections.abc import Callable
from typing import Any

from runtime.grammar.engine import MAX_REPEAT
from runtime.grammar.json_schema.keywords import DEFINITIONS, EXACT, SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS, TYPES
from runtime.grammar.json_schema.locations import is_annotation


def with_exact_formats(schema: Any) -> Any:
    """Replaces formats for which the library is too loose by patterns."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA:
            value = with_exact_formats(value)
        elif keyword in SCHEMA_LISTS:
            value = [with_exact_formats(each) for each in value]
        elif keyword in SCHEMA_MAPS or keyword in DEFINITIONS:
            value = {name: with_exact_formats(each) for name, each in value.items()}
        found[keyword] = value
    pattern = EXACT.get(found.get("format", ""))
    if pattern is not None:
        del found["format"]
        if "pattern" in found:
            found["allOf"] = [*found.get("allOf", ()), {"pattern": pattern}]
        else:
            found["pattern"] = pattern
    return found


# What they evaluate is not seen in the schema itself (JSON Schema core, section 11).
_ELSEWHERE = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("dependentSchemas", "dependentRequired", "dependencies", "contains", "additionalItems"),
    }
)

_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}


def simplified(schema: Any) -> Any:
    """Returns a schema that is valid for the same instances. It may be invalid: the caller checks it."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    _take_unevaluated(found)
    # What is unevaluated depends on all that stands beside it.
    for rule in () if _UNEVALUATED.keys() & set(found) else _RULES:
        rule(found)
    if _is_true(found.get("not", False)):
        return False
    for keyword, value in found.items():
        if keyword in SCHEMA:
            found[keyword] = simplified(value)
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            found[keyword] = [simplified(each) for each in value]
        elif isinstance(value, dict) and (keyword in SCHEMA_MAPS or keyword in DEFINITIONS):
            found[keyword] = {name: simplified(each) for name, each in value.items()}
    return found


def _is_true(schema: Any) -> bool:
    return schema is True or schema == {}


def _take_unevaluated(schema: dict[str, Any]) -> None:
    """If nothing else evaluates, what is unevaluated is what is additional."""
    for keyword, other in _UNEVALUATED.items():
        if keyword in schema and (_is_true(schema[keyword]) or not _ELSEWHERE & set(schema)):
            rest = schema.pop(keyword)
            schema.setdefault(other, rest)


def _references(schema: dict[str, Any]) -> None:
    """A document is one resource, because an $id within it is refused: there is nothing dynamic."""
    if "$ref" not in schema and "$dynamicRef" in schema:
        schema["$ref"] = schema.pop("$dynamicRef")


def _conditions(schema: dict[str, Any]) -> None:
    if "if" not in schema:
        # They say nothing alone.
        schema.pop("then", None)
        schema.pop("else", None)
    elif _is_true(schema["if"]) or schema["if"] is False:
        taken = "then" if _is_true(schema.pop("if")) else "else"
        case = schema.get(taken, True)
        schema.pop("then", None)
        schema.pop("else", None)
        _add(schema, case)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _dependent(schema: dict[str, Any]) -> None:
    required, schemas = schema.get("dependentRequired"), schema.get("dependentSchemas")
    if isinstance(required, dict) and all(isinstance(names, list) for names in required.values()):
        del schema["dependentRequired"]
        for name, names in required.items():
            if names:
                _add(schema, {"anyOf": [_without(name), {"required": names}]})
    if isinstance(schemas, dict):
        del schema["dependentSchemas"]
        for name, case in schemas.items():
            if not _is_true(case):
                _add(schema, _without(name) if case is False else {"anyOf": [_without(name), case]})


def _without(name: str) -> dict[str, Any]:
    # Says that it is not closed, for disable_additional_properties.
    return {"properties": {name: False}, "additionalProperties": True}


def _items(schema: dict[str, Any]) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"], schema["minContains"]


def _names(schema: dict[str, Any]) -> None:
    """Says which names there may be by the properties that there are."""
    names = schema.get("propertyNames")
    if _is_true(names):
        del schema["propertyNames"]
    elif names is False:
        del schema["propertyNames"]
        schema["maxProperties"] = 0
    elif isinstance(names, dict) and not {"properties", "patternProperties"} & set(schema):
        constraints = {keyword: value for keyword, value in names.items() if not is_annotation(keyword)}
        if constraints.get("type") == "string":
            del constraints["type"]
        described = _described(constraints, schema.get("additionalProperties", True))
        if described is not None:
            del schema["propertyNames"]
            schema |= described | {"additionalProperties": False}


def _described(names: dict[str, Any], value: Any) -> dict[str, Any] | None:
    """Returns the properties of certain names, all of one schema; None if they can't be said."""
    match names:
        case {"pattern": str(pattern)} if len(names) == 1:
            return {"patternProperties": {pattern: value}}
        case {"const": str(name)} if len(names) == 1:
            return {"properties": {name: value}}
        case {"enum": [*texts]} if len(names) == 1:
            # Other values are no names.
            return {"properties": {name: value for name in texts if isinstance(name, str)}}
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if set(names) <= {"minLength", "maxLength"} and all(
        each == "" or (type(each) is int and 0 <= each <= MAX_REPEAT) for each in (least, most)
    ):
        return {"patternProperties": {f"^[\\s\\S]{{{least},{most}}}$": value}}
    return None


def _cases(schema: dict[str, Any]) -> None:
    """Cases of which none or one can hold, and types that are excluded."""
    cases = schema.get("oneOf")
    if isinstance(cases, list) and cases:
        possible = [case for case in cases if case is not False]
        if not possible:
            _add(schema, False)
        elif len(possible) == 1:
            _add(schema, possible[0])
        if len(possible) < 2:
            del schema["oneOf"]
    excluded = schema.get("not")
    if excluded is False:
        del schema["not"]
    elif isinstance(excluded, dict) and set(excluded) == {"type"}:
        types = excluded["type"] if isinstance(excluded["type"], list) else [excluded["type"]]
        # Numbers that are no integers have no type of their own.
        if all(each in TYPES for each in types) and ("number" in types or "integer" not in types):
            del schema["not"]
            left = [each for each in TYPES if each not in types and each != "integer"]
            _add(schema, {"type": left} if left else False)


def _add(schema: dict[str, Any], other: Any) -> None:
    """Has instances be valid against another schema, too."""
    if _is_true(other):
        return
    others = schema.get("allOf", [])
    schema["allOf"] = [*others, other] if isinstance(others, list) else others


_RULES: tuple[Callable[[dict[str, Any]], None], ...] = (_references, _conditions, _dependent, _items, _names, _cases)
