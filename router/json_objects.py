"""Reads the JSON texts in messages: schemas of tools, arguments of calls, and what only templates know.

All that read such a text read it here: what was checked is then what is used. Other readers differ. Python's takes NaN,
1e999 and half of a surrogate pair, where the one that checks requests takes none of them, or only 1e999; and what they
take can't be written again, for a template, a grammar or a client.
"""

import json
import re
from typing import Any

from pydantic_core import from_json

# Only such a number can be beyond a double.
_LARGE_NUMBER = re.compile(r"\d[eE]|\d{309}")


def json_value(text: str) -> Any:
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
    """Returns the object that a text is. Raises ValueError, which begins with the text's name."""
    try:
        value = json_value(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _check_finite(value: Any) -> None:
    """Raises ValueError. Integers are written, too: Python refuses those of more than 4300 digits."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("it has a number beyond a double") from None
