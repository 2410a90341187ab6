"""Flags that say what is sent, the same for `octavo bench serve`, `octavo bench sweep` and `octavo tune`."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench.flags import SEED
from octavo.cli.flags import LENGTHS

if TYPE_CHECKING:
    from octavo.bench.datasets.chosen import DatasetQuery

_REQUESTS = "What is sent"


# As octavo.bench.datasets.chosen.DatasetKind, which imports numpy.
class Dataset(StrEnum):
    RANDOM = "random"
    PREFIXES = "prefixes"
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The flags as given. A field is a flag; `_FLAGS` has their types and help."""

    dataset: Dataset
    dataset_path: Path | None
    prompt_len: str
    output_len: str
    prefix_len: int
    num_prefixes: int
    length_scale: float
    burstiness: float
    seed: int

    def query(self, *, tokenizer: str = "") -> "DatasetQuery":
        """Raises ModuleNotFoundError without the packages of octavo[plan], and typer.BadParameter."""
        from octavo.bench.datasets.chosen import DatasetKind, DatasetQuery

        for name in ("burstiness", "length_scale"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise typer.BadParameter(f"{value:g} is not above 0", param_hint=f"--{name.replace('_', '-')}")
        return DatasetQuery(
            kind=DatasetKind(self.dataset),
            path=self.dataset_path,
            prompt_len=self.prompt_len,
            output_len=self.output_len,
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
            length_scale=self.length_scale,
            tokenizer=tokenizer,
        )


def _flag(kind: Any, default: Any, help: str, **more: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(rich_help_panel=_REQUESTS, help=help, **more)], default


# Type and default by name.
_FLAGS: dict[str, tuple[Any, Any]] = {
    "dataset": _flag(
        Dataset,
        Dataset.RANDOM,
        "random: prompts without a common beginning. prefixes: prompts that begin with one of a few texts. "
        "sharegpt: questions of a file of conversations, JSON or JSON lines. mooncake: lengths, times and shared "
        "blocks of a trace with timestamps, JSON lines. trace: what `octavo up --trace` recorded.",
    ),
    "dataset_path": _flag(Path | None, None, "The file of the dataset.", metavar="FILE"),
    "prompt_len": _flag(str, "", f"Tokens in each prompt: {LENGTHS}. Default: 128.", metavar="LENGTH"),
    "output_len": _flag(
        str,
        "",
        "Tokens in each output, exactly; in the same forms. Default: 128, or as in the dataset.",
        metavar="LENGTH",
    ),
    "prefix_len": _flag(int, 0, "With --dataset prefixes: tokens of each common beginning.", min=0),
    "num_prefixes": _flag(int, 1, "With --dataset prefixes: how many of them there are.", min=1),
    "length_scale": _flag(float, 1.0, "With --dataset mooncake: factor of all lengths, such as 0.05."),
    "burstiness": _flag(
        float,
        1.0,
        "Shape of the gamma distribution of times between requests. 1: a Poisson process. Less: bursts. More: even.",
    ),
    "seed": (SEED, 0),
}


def with_load_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the parameter `load` of a command by these flags."""
    signature = inspect.signature(command)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _FLAGS.items()
    ]
    own = [parameter for name, parameter in signature.parameters.items() if name != "load"]
    # `**flags` has to stay the last one.
    last = [each for each in own if each.kind is inspect.Parameter.VAR_KEYWORD]
    first = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each not in last]

    @functools.wraps(command)
    def with_load(**values: Any) -> Any:
        return command(load=LoadFlags(**{name: values.pop(name) for name in _FLAGS}), **values)

    parameters = [*first, *flags, *last]
    with_load.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_load.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_load
