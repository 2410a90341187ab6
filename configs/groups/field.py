"""Defines an option, and the groups in which `octavo up --help` shows options."""

from pydantic import Field

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


def as_number(value: object) -> object:
    """Accepts a number as text, for options that choose between numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def split_commas(value: object) -> object:
    """Accepts a list as "a,b", from the environment or a flag."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
