"""The settings to choose from: every combination of the values of some options."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.options import Options
from octavo.tune.errors import TuningError

# Options that make a grid. Those that the scheduler's core alone depends on are predicted from any probe.
PREDICTED = ("max_num_seqs", "max_num_batched_tokens", "speculative_config")
AXES = (
    *PREDICTED,
    "block_size",
    "max_steps_in_flight",
    "worker_threads",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "quantization",
)
_TEXT = ("speculative_config", "quantization")
# Stands for no speculation in lists of methods.
OFF = "off"
_SHORT = {
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "speculative_config": "drafts",
    "block_size": "block",
    "max_steps_in_flight": "in flight",
    "worker_threads": "threads",
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
    "quantization": "quantization",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the grid: values of options, in the order of AXES."""

    values: tuple[tuple[str, Any], ...]

    @property
    def options(self) -> dict[str, object]:
        """Options as flags: `off` is left out, and a method of speculation becomes its JSON."""
        return {
            name: json.dumps({"method": value}) if name == "speculative_config" and value[:1] != "{" else value
            for name, value in self.values
            if not (name == "speculative_config" and value == OFF)
        }

    @property
    def label(self) -> str:
        """A name for people, such as "seqs 64, tokens 512"."""
        return ", ".join(f"{_SHORT.get(name, name)} {value}" for name, value in self.values)

    @property
    def key(self) -> str:
        return json.dumps(dict(self.values), sort_keys=True)

    @property
    def engine(self) -> tuple[tuple[str, Any], ...]:
        """The values on which the cost of a step depends."""
        return tuple((name, value) for name, value in self.values if name not in PREDICTED)

    def value(self, name: str) -> Any:
        return dict(self.values)[name]


def parse_values(text: str, name: str) -> tuple[Any, ...]:
    """Parses the values of an axis, such as 64,128. Raises TuningError."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    flag = f"--{name.replace('_', '-')}"
    if name in _TEXT:
        if not parts:
            raise TuningError(f"{flag}={text!r}: give names with commas, such as {OFF},suffix")
        return parts
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise TuningError(f"{flag}={text!r} is not a list of numbers above 0, such as 64,128,256")
    return tuple(map(int, parts))


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Every combination, in the order of AXES."""
    names = [name for name in AXES if name in axes]
    return [
        Candidate(tuple(zip(names, values, strict=True))) for values in itertools.product(*(axes[n] for n in names))
    ]


def parse_assignments(texts: Sequence[str], flag: str) -> dict[str, tuple[str, ...]]:
    """Parses NAME=V,V,... of any options; values of one name add up, and JSON is one value. Raises TuningError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        parts = (values,) if values.startswith(("{", "[")) else tuple(part.strip() for part in values.split(","))
        if not equals or name not in Options.model_fields or not all(parts):
            raise TuningError(f"{flag}={text!r}: give an option of `octavo up` and its values, as max_num_seqs=16,64")
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), *parts)))
    return found


def product(values: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    """Every combination of values of any options."""
    return [Candidate(tuple(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def default_axes(options: Options) -> dict[str, tuple[int, ...]]:
    """The guide's grid: a quarter, half, once and twice the option for rows, and for the budget of a step."""
    seqs, tokens = options.max_num_seqs, options.max_num_batched_tokens
    return {
        "max_num_seqs": tuple(dict.fromkeys(max(1, seqs * factor // 4) for factor in (1, 2, 4, 8))),
        "max_num_batched_tokens": tuple(dict.fromkeys(max(16, tokens * factor // 4) for factor in (1, 2, 4, 8))),
    }
