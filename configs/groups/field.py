"""Defines an option, and the groups in which `octavo up --help` shows options."""

import json
from collections.abc import Callable

from pydantic import BeforeValidator, Field

MODEL, CACHE, GPU, SCHEDULING, PARALLEL, ROUTER, NETWORK, LOGS = (
    "Model",
    "KV cache",
    "GPU",
    "Scheduling",
    "Parallelism and processes",
    "Router",
    "Network and security",
    "Logs and metrics",
)


def option(group: str, default: object, help: str, **bounds: object):
    """Makes a field with its help text and its group."""
    kind = "default_factory" if callable(default) else "default"
    return Field(**{kind: default}, description=help, json_schema_extra={"group": group}, **bounds)  # type: ignore[call-overload]


def json_text(example: str, empty: Callable[[], object] = dict) -> BeforeValidator:
    """Accepts JSON as text, from the environment or a flag. example: valid JSON, for errors. empty: makes the value of
    an empty text."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.strip() else empty()
        except ValueError as error:
            raise ValueError(f"it is not valid JSON ({error}): give an object, such as {example}") from None

    return BeforeValidator(read)


def as_number(value: object) -> object:
    """Accepts a number as text, for options that choose between numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def split_commas(value: object) -> object:
    """Accepts a list as "a,b", from the environment or a flag."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
