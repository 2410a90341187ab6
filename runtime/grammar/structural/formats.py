"""Structural tags: the texts of vLLM and xgrammar, checked, in one form.

{"type": "structural_tag", "format": ...} of today, and {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
of before, which becomes a format of today's kind `triggered_tags`.
"""

from collections.abc import Callable
from typing import Any

from runtime.grammar.engine import MAX_CHOICES, MAX_DEPTH, MAX_REPEAT, ConstraintError
from runtime.grammar.json_schema.canonical import canonical_schema
from runtime.grammar.json_text import read_json, write_json
from runtime.grammar.lark.gbnf import canonical_grammar
from runtime.grammar.lark.text import check_regex

FIELD = "structural_tag"


def canonical_structural_tag(text: str, *, is_closed: bool) -> str:
    """Returns the canonical text. is_closed: disable_additional_properties. Raises ConstraintError."""
    value = read_json(text, FIELD)
    if not isinstance(value, dict):
        raise ConstraintError(f"{FIELD} must be an object")
    if "structures" in value:
        value = {"type": FIELD, "format": _of_before(value)}
    if value.get("type", FIELD) != FIELD or "format" not in value or set(value) - {"type", "format"}:
        raise ConstraintError(f'{FIELD} must be {{"type": "{FIELD}", "format": ...}}')
    return write_json({"type": FIELD, "format": _Checker(is_closed).format(value["format"], "format", 0)})


def _of_before(value: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise ConstraintError(f"{FIELD}: structures must be a list of objects")
    tags = [
        {
            **{name: each[name] for name in each if name != "schema"},
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Checker:
    def __init__(self, is_closed: bool) -> None:
        self._is_closed = is_closed
        self._kinds: dict[str, Callable[[dict[str, Any], str, int], dict[str, Any]]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._elements,
            "or": self._elements,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def format(self, value: Any, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(place, "must be an object")
        if depth > MAX_DEPTH:
            raise _wrong(place, f"is nested more than {MAX_DEPTH} deep")
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise _wrong(place, f"type {kind!r:.80} is not supported: use one of {', '.join(self._kinds)}")
        return {"type": kind} | self._kinds[kind](value, place, depth)

    def _const_string(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "value")
        return {"value": _text(value, "value", place)}

    def _json_schema(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "json_schema", "style")
        if value.get("style", "json") != "json":
            raise _wrong(place, f"style {value['style']!r:.80} is not supported")
        if "json_schema" not in value:
            raise _wrong(place, "json_schema is missing")
        try:
            schema = canonical_schema(write_json(value["json_schema"]), is_closed=self._is_closed)
        except ConstraintError as error:
            raise _wrong(place, str(error)) from None
        return {"json_schema": read_json(schema, place)}

    def _regex(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "pattern")
        pattern = _text(value, "pattern", place)
        check_regex(pattern, f"{FIELD} at {place}")
        return {"pattern": pattern}

    def _grammar(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "grammar")
        return {"grammar": canonical_grammar(_text(value, "grammar", place), f"{FIELD} at {place}: grammar")}

    def _any_text(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "excludes")
        excludes = _texts(value, "excludes", place, least=0)
        return {"excludes": excludes} if excludes else {}

    def _elements(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "elements")
        return {"elements": self._list(value, "elements", place, depth)}

    def _repeated(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        bounds = ("min", "max") if value["type"] == "repeat" else ()
        _known(value, place, "content", *bounds)
        for bound in bounds:
            number = value.get(bound)
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_REPEAT:
                raise _wrong(place, f"{bound} must be a number of 0 to {MAX_REPEAT}")
        if bounds and value["min"] > value["max"]:
            raise _wrong(place, "min is above max")
        found = {"content": self.format(value.get("content"), f"{place}.content", depth + 1)}
        return found | {bound: value[bound] for bound in bounds}

    def _tag(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "begin", "content", "end")
        end = value.get("end")
        ends = [_text(value, "end", place)] if isinstance(end, str) else _texts(value, "end", place, least=1)
        content = self.format(value.get("content"), f"{place}.content", depth + 1)
        return {"begin": _text(value, "begin", place), "content": content, "end": list(dict.fromkeys(ends))}

    def _tags(self, value: dict[str, Any], place: str, depth: int) -> list[dict[str, Any]]:
        tags = value.get("tags")
        if isinstance(tags, list):
            value = value | {"tags": [{"type": "tag", **each} if isinstance(each, dict) else each for each in tags]}
        found = self._list(value, "tags", place, depth)
        for index, tag in enumerate(found):
            if tag["type"] != "tag":
                raise _wrong(f"{place}.tags[{index}]", "must be a tag")
        return found

    def _triggered_tags(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        triggers = _texts(value, "triggers", place, least=1)
        tags = self._tags(value, place, depth)
        for index, tag in enumerate(tags):
            if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
                raise _wrong(f"{place}.tags[{index}]", "begin must start with exactly one of the triggers")
        excludes = _texts(value, "excludes", place, least=0)
        return (
            {"triggers": triggers, "tags": tags} | _flags(value, place) | ({"excludes": excludes} if excludes else {})
        )

    def _tags_with_separator(self, value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        _known(value, place, "tags", "separator", "at_least_one", "stop_after_first")
        found = {"tags": self._tags(value, place, depth), "separator": _text(value, "separator", place)}
        return found | _flags(value, place)

    def _list(self, value: dict[str, Any], name: str, place: str, depth: int) -> list[dict[str, Any]]:
        items = value.get(name)
        if not isinstance(items, list) or not 0 < len(items) <= MAX_CHOICES:
            raise _wrong(place, f"{name} must be a list of 1 to {MAX_CHOICES} formats")
        return [self.format(each, f"{place}.{name}[{index}]", depth + 1) for index, each in enumerate(items)]


def _wrong(place: str, what: str) -> ConstraintError:
    return ConstraintError(f"{FIELD} at {place}: {what}")


def _known(value: dict[str, Any], place: str, *names: str) -> None:
    unknown = [name for name in value if name not in names and name != "type"]
    if unknown:
        raise _wrong(place, f"{unknown[0][:80]!r} is not supported")


def _text(value: dict[str, Any], name: str, place: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise _wrong(place, f"{name} must be a string")
    return found


def _texts(value: dict[str, Any], name: str, place: str, *, least: int) -> list[str]:
    found = value.get(name, [])
    if (
        not isinstance(found, list)
        or not least <= len(found) <= MAX_CHOICES
        or not all(isinstance(each, str) and (each or name == "end") for each in found)
    ):
        raise _wrong(place, f"{name} must be a list of {least} to {MAX_CHOICES} texts, none empty")
    return found


def _flags(value: dict[str, Any], place: str) -> dict[str, Any]:
    flags = {name: value.get(name, False) for name in ("at_least_one", "stop_after_first")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise _wrong(place, f"{name} must be true or false")
    return flags
