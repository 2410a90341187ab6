"""The canonical form of a JSON schema.

It has the keywords that say something about instances, in the order in which the client wrote them: the order of
properties is the order in which they are generated. A keyword that the library would ignore, or honour in part, is
refused by its name.
"""

from typing import Any

from runtime.grammar.engine import MAX_ENUM, MAX_INTEGER, MAX_ITEMS, MAX_LENGTH, MAX_SCHEMAS, ConstraintError
from runtime.grammar.json_schema.code_points import has_writable
from runtime.grammar.json_schema.keywords import (
    ANCHORS,
    COUNTS,
    DEFINITIONS,
    DRAFTS,
    FORMATS,
    HINTS,
    IN_PLACE,
    LONELY_REF_DRAFTS,
    NUMBERS,
    SCHEMA,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    TYPES,
)
from runtime.grammar.json_schema.locations import Locations, Path, is_annotation
from runtime.grammar.json_schema.patterns import anchored_pattern
from runtime.grammar.json_schema.simplified import simplified
from runtime.grammar.json_text import check_size, pointer, read_json, reference, write_json

# The library compiles a schema from left to right, and a keyword that describes the rest of an object or array must
# not be parted from those that describe its beginning.
_TOGETHER = {
    "properties": ("patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    "prefixItems": ("items", "minItems", "maxItems"),
}


def canonical_schema(text: str, *, is_closed: bool) -> str:
    """Returns the canonical text of a schema. is_closed: disable_additional_properties. Raises ConstraintError."""
    while True:
        document = simplified(read_json(text, "json_schema"))
        written = write_json(_Writer(document, is_closed).schema(document, ()))
        check_size(written, "json_schema, with patterns and cases written in full,")
        if written == text:
            return text
        # A case of a oneOf that was a reference may have left its definition without use.
        text = written


# Stands for the value of a keyword that is left out.
_LEFT_OUT = object()


class _Writer:
    def __init__(self, document: Any, is_closed: bool) -> None:
        self._is_closed = is_closed
        self._num_schemas = 0
        self._locations = Locations(document)
        self._reached = self._locations.reached()
        self._draft = ""
        if isinstance(document, dict) and "$schema" in document:
            draft = document["$schema"]
            self._draft = draft.rstrip("#") if isinstance(draft, str) else ""
            if self._draft not in DRAFTS:
                raise ConstraintError(
                    f"json_schema: $schema {draft!r:.200} is not known: leave it out for draft 2020-12, or use one of "
                    f"{', '.join(sorted(DRAFTS))}"
                )

    def schema(self, schema: Any, path: Path) -> Any:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise ConstraintError(
                f"json_schema has more than {MAX_SCHEMAS} schemas, with cases of oneOf written in full"
            )
        if isinstance(schema, bool):
            return schema if path else ({} if schema else False)
        if not isinstance(schema, dict):
            raise _wrong(path, "a schema must be an object or a boolean")
        self._check_together(schema, path)
        schema = schema | self._closing(schema, path)
        values = {keyword: self._value(keyword, schema[keyword], path) for keyword in _ordered(schema)}
        return {keyword: value for keyword, value in values.items() if value is not _LEFT_OUT}

    def _value(self, keyword: str, value: Any, path: Path) -> Any:
        """Returns a keyword's value in its canonical form, or _LEFT_OUT."""
        if is_annotation(keyword) or keyword in ANCHORS or (not path and keyword in ("$schema", "$id")):
            return _LEFT_OUT
        if keyword in SCHEMA:
            return self._within(keyword, value, path)
        if keyword in SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise _wrong(path, f"{keyword} must be a list of schemas")
            found = [self.schema(each, (*path, keyword, index)) for index, each in enumerate(value)]
            return [self._unfolded(each, path) for each in found] if keyword == "oneOf" else found
        if keyword in SCHEMA_MAPS:
            return self._map(keyword, value, path)
        if keyword in DEFINITIONS:
            return self._definitions(keyword, value, path)
        if keyword == "$ref":
            return reference(self._locations.target(value, pointer(path)))
        return self._plain(keyword, value, path)

    def _within(self, keyword: str, value: Any, path: Path) -> Any:
        if keyword == "items" and isinstance(value, list):
            raise _wrong(path, "items with a list of schemas is of older drafts: use prefixItems")
        return self.schema(value, (*path, keyword))

    def _map(self, keyword: str, value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, f"{keyword} must be an object")
        found = {name: self.schema(each, (*path, keyword, name)) for name, each in value.items()}
        if keyword == "properties":
            return found
        patterns = {
            anchored_pattern(name, f"patternProperties at {pointer(path)}"): each for name, each in found.items()
        }
        if len(patterns) != len(found):
            raise _wrong(path, "patternProperties has two patterns that are the same")
        return patterns

    def _definitions(self, keyword: str, value: Any, path: Path) -> Any:
        """Keeps the definitions from which something is used: the others may have any keyword."""
        if not isinstance(value, dict):
            raise _wrong(path, f"{keyword} must be an object")
        used = {
            each[len(path) + 1]
            for each in self._reached
            if len(each) > len(path) + 1 and each[: len(path) + 1] == (*path, keyword)
        }
        return {
            name: self.schema(each, (*path, keyword, name)) for name, each in value.items() if name in used
        } or _LEFT_OUT

    def _unfolded(self, schema: Any, path: Path) -> Any:
        """Replaces a reference by its schema: the library tells cases of a oneOf apart by what stands in them."""
        while isinstance(schema, dict) and set(schema) == {"$ref"}:
            target = self._locations.target(schema["$ref"], pointer(path))
            if target in self._locations.reached(target) or target == ():
                # It uses itself.
                return schema
            schema = self.schema(self._locations.schema(target), target)
            if isinstance(schema, dict):
                schema = {keyword: value for keyword, value in schema.items() if keyword not in DEFINITIONS}
        return schema

    def _plain(self, keyword: str, value: Any, path: Path) -> Any:
        match keyword:
            case "type":
                names = value if isinstance(value, list) else [value]
                if not names or any(name not in TYPES for name in names) or len(set(names)) < len(names):
                    raise _wrong(path, f"type must be one or some of {', '.join(TYPES)}")
                return value
            case "const":
                _check_literal(value, f"const at {pointer(path)}")
                return value
            case "enum":
                if not isinstance(value, list) or not 0 < len(value) <= MAX_ENUM:
                    raise _wrong(path, f"enum must be a list of 1 to {MAX_ENUM} values")
                _check_literal(value, f"enum at {pointer(path)}")
                return value
            case "required":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise _wrong(path, "required must be a list of names")
                return list(dict.fromkeys(value))
            case "pattern":
                if not isinstance(value, str):
                    raise _wrong(path, "pattern must be a string")
                return anchored_pattern(value, f"pattern at {pointer(path)}")
            case "format":
                if not isinstance(value, str) or value not in FORMATS:
                    raise _wrong(path, f"format {value!r:.80} is not known: use one of {', '.join(sorted(FORMATS))}")
                return value
        if keyword in COUNTS:
            return _count(keyword, value, path)
        if keyword in NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(path, f"{keyword} must be a number")
            _check_literal(value, f"{keyword} at {pointer(path)}")
            if keyword == "multipleOf" and value <= 0:
                raise _wrong(path, "multipleOf must be above 0")
            return value
        hint = f": {HINTS[keyword]}" if keyword in HINTS else ""
        raise _wrong(path, f"the keyword {keyword[:80]!r} is not supported{hint}")

    def _check_together(self, schema: dict[str, Any], path: Path) -> None:
        """Refuses keywords that the library does not honour together."""
        if "$ref" in schema and self._draft in LONELY_REF_DRAFTS:
            others = [each for each in schema if each != "$ref" and not is_annotation(each) and each not in DEFINITIONS]
            if set(others) - {"$schema", "$id"}:
                raise _wrong(path, f"$ref with {others[0]!r} means something else since draft 2019-09: use allOf")
        least, required = schema.get("minProperties"), schema.get("required", [])
        if isinstance(least, int | float) and isinstance(required, list) and least - len(set(map(str, required))) > 1:
            raise _wrong(
                path, f"minProperties {least} asks for more than one property besides the required ones: name them"
            )

    def _closing(self, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        """disable_additional_properties: closes an object that names properties and says nothing of others."""
        if not self._is_closed or "additionalProperties" in schema:
            return {}
        parts = [keyword for keyword in schema if keyword in IN_PLACE]
        num_parts = sum(
            len(schema[part]) if isinstance(schema[part], list) and part == "allOf" else 1 for part in parts
        )
        has_names = bool({"properties", "patternProperties"} & set(schema))
        if num_parts + has_names > 1:
            raise _wrong(
                path, f"disable_additional_properties does not go with {parts[0]} beside other keywords of an object"
            )
        return {"additionalProperties": False} if has_names else {}


def _wrong(path: Path, what: str) -> ConstraintError:
    return ConstraintError(f"json_schema at {pointer(path)}: {what}")


def _ordered(schema: dict[str, Any]) -> list[str]:
    """Returns the keywords in the order of the schema, those that belong together side by side."""
    found: list[str] = []
    for keyword in schema:
        head = next((each for each, tail in _TOGETHER.items() if keyword in tail and each in schema), keyword)
        for each in (head, *_TOGETHER.get(head, ())):
            if each in schema and each not in found:
                found.append(each)
    return found


def _count(keyword: str, value: Any, path: Path) -> int:
    most = MAX_LENGTH if keyword.endswith("Length") else MAX_ITEMS
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise _wrong(path, f"{keyword} must be a whole number of at least 0")
    if value > most:
        raise _wrong(path, f"{keyword} is {value}: use at most {most}")
    return int(value)


def _check_literal(value: Any, place: str) -> None:
    """Raises ConstraintError for what the library would not keep: large integers, and some control characters."""
    match value:
        case bool() | None:
            return
        case int() if abs(value) > MAX_INTEGER:
            raise ConstraintError(f"json_schema: {place} has {value}, which is beyond 2**53 and not exact")
        case str():
            control = next((each for each in value if not has_writable(((ord(each), ord(each)),))), None)
            if control is not None:
                raise ConstraintError(f"json_schema: {place} has the control character U+{ord(control):04X}")
        case list():
            for each in value:
                _check_literal(each, place)
        case dict():
            for name, each in value.items():
                _check_literal(name, place)
                _check_literal(each, place)
