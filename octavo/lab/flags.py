"""Flags of commands, declared once: the fields of a dataclass, which a command passes on as it is.

Imported by `octavo --help`: nothing here, or in the modules that declare flags, may be slow to import.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

# How lengths of prompts and outputs are given.
LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"


def flag(default: Any, panel: str | None, help: str, *names: str, **more: Any) -> Any:
    """A field that is a flag. panel: its heading in --help. names: if not made from the field's. more: arguments of
    typer.Option."""
    return field(default=default, metadata={"option": typer.Option(*names, help=help, rich_help_panel=panel, **more)})


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces each parameter of a command that is such a dataclass by its flags, in their order."""
    signature = inspect.signature(command)
    records: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, own in signature.parameters.items():
        if name in records:
            for each in fields(records[name]):
                kind = Annotated[each.type, each.metadata["option"]]
                parameters.append(own.replace(name=each.name, default=each.default, annotation=kind))
        else:
            parameters.append(own)

    @functools.wraps(command)
    def with_records(**values: Any) -> Any:
        made = {
            name: record(**{each.name: values.pop(each.name) for each in fields(record)})
            for name, record in records.items()
        }
        return command(**made, **values)

    with_records.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_records.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_records


class DatasetKind(StrEnum):
    RANDOM = "random"
    PREFIXES = "prefixes"
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"
    TRACE = "trace"


class Ramp(StrEnum):
    """How a rate goes from its start to its end over the requests: by equal steps, or by equal factors."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


_SENT = "What is sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The requests of a load, the same flags for `octavo bench serve`, `octavo bench sweep` and `octavo tune`. Empty
    text and 0: not given."""

    dataset: DatasetKind = flag(
        DatasetKind.RANDOM,
        _SENT,
        "random: prompts without a common beginning. prefixes: prompts that begin with one of a few texts. sharegpt: "
        "questions of a file of conversations, JSON or JSON lines. mooncake: lengths, times and shared blocks of a "
        "trace with timestamps, JSON lines. trace: what `octavo up --trace` recorded.",
    )
    dataset_path: Path | None = flag(None, _SENT, "The file of the dataset.", metavar="FILE")
    prompt_len: str = flag("", _SENT, f"Tokens in each prompt: {LENGTHS}. Default: 128.", metavar="LENGTH")
    output_len: str = flag(
        "",
        _SENT,
        "Tokens in each output, exactly; in the same forms. Default: 128, or as in the dataset.",
        metavar="LENGTH",
    )
    prefix_len: int = flag(0, _SENT, "With --dataset prefixes: tokens of each common beginning.", min=0)
    num_prefixes: int = flag(1, _SENT, "With --dataset prefixes: how many of them there are.", min=1)
    length_scale: float = flag(1.0, _SENT, "With --dataset mooncake: factor of all lengths, such as 0.05.")
    burstiness: float = flag(
        1.0,
        _SENT,
        "Shape of the gamma distribution of times between requests. 1: a Poisson process. Less: bursts. More: even.",
    )
    seed: int = flag(0, None, "Seed for prompts and arrival times.", min=0)
