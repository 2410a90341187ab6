"""JSON texts of clients: read strictly, and written in one form.

Schemas of constraints are read by `read_json`; schemas of tools, arguments of calls and what only templates know by
`json_object`. All that read such a text read it here: what was checked is then what is used. Python's own reader takes
NaN, 1e999 and half of a surrogate pair, which can't be written again for a template, a grammar or a client.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import quote

from pydantic_core import from_json

from runtime.grammar.engine import MAX_DEPTH, MAX_TEXT_BYTES, ConstraintError

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKETS = re.compile(r"[\[{]|[\]}]")
# Only such a number can be beyond a double.
_LARGE_NUMBER = re.compile(r"\d[eE]|\d{309}")


def check_size(text: str, field: str) -> None:
    """Raises ConstraintError if a text has too many bytes, or characters that UTF-8 can't write."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConstraintError(f"{field} has half of a surrogate pair") from None
    if size > MAX_TEXT_BYTES:
        raise ConstraintError(f"{field} has {size} bytes: use at most {MAX_TEXT_BYTES}")


def read_json(text: str, field: str) -> Any:
    """Returns the value of a JSON text. Raises ConstraintError, also for names that repeat and for deep nesting."""
    check_size(text, field)
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ConstraintError(f"{field} is nested {deepest} deep: use at most {MAX_DEPTH}")

    def constant(name: str) -> NoReturn:
        raise ConstraintError(f"{field} has {name}, which is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise ConstraintError(f"{field} has a number beyond a double: {digits[:40]}")
        return value

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ConstraintError(f"{field} has the name {next(n for n in names if names.count(n) > 1)!r} twice")
        return found

    try:
        value = json.loads(text, parse_constant=constant, parse_float=number, object_pairs_hook=members)
        # An escape can name half of a surrogate pair.
        write_json(value).encode()
    except ConstraintError:
        raise
    except UnicodeEncodeError:
        raise ConstraintError(f"{field} has half of a surrogate pair") from None
    except ValueError as error:
        raise ConstraintError(f"{field} is not valid JSON: {error}") from None
    return value


def finite_json(text: str) -> Any:
    """Returns the value of a JSON text: finite numbers, whole characters, at most 200 deep; of names that repeat, the
    last one counts. Raises ValueError, which does not say what the text is."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except TypeError:
        raise ValueError("it has half of a surrogate pair") from None
    if _LARGE_NUMBER.search(text):
        _check_finite(value)
    return value


def json_object(text: str, name: str) -> dict[str, Any]:
    """Returns the object that a text is; see `finite_json`. Raises ValueError, which begins with the text's name."""
    try:
        value = finite_json(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _check_finite(value: Any) -> None:
    """Raises ValueError. Integers are written, too: Python refuses those of more than 4300 digits."""
    try:
        write_json(value)
    except ValueError:
        raise ValueError("it has a number beyond a double") from None


def write_json(value: Any) -> str:
    """Returns the text of a value: without spaces, names in their order, characters unescaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def reference(path: Sequence[str | int]) -> str:
    """Returns a pointer as $ref writes it: as a URI has it, which has no quotes or spaces."""
    return "#" + quote(pointer(path)[1:], safe="/~!$&'()*+,;=:@-._")


def pointer(path: Sequence[str | int]) -> str:
    """Returns a JSON pointer (RFC 6901) behind a #: "#/properties/a"."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
