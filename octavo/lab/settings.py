"""Settings: points of a grid of options, which plans simulate, and tuning runs and sweeps measure."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import load_options
from configs.options import Options
from octavo.lab.errors import TuningError

LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Options that the scheduler's core alone depends on: any probe's steps tell what they change.
PREDICTED = ("max_num_seqs", "max_num_batched_tokens", "speculative_config")
# Options that make a grid, in their order, with short names for people.
SHORT = {
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
AXES = tuple(SHORT)
_TEXT = ("speculative_config", "quantization")
# Stands for no speculation in lists of methods.
OFF = "off"


@dataclass(frozen=True, slots=True)
class Setting:
    """A point of the grid: values of options, in the order of the grid's axes."""

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
        return ", ".join(f"{SHORT.get(name, name)} {value}" for name, value in self.values)

    @property
    def key(self) -> str:
        return json.dumps(dict(self.values), sort_keys=True)

    @property
    def engine(self) -> tuple[tuple[str, Any], ...]:
        """The values on which the cost of a step depends."""
        return tuple((name, value) for name, value in self.values if name not in PREDICTED)

    def value(self, name: str) -> Any:
        return dict(self.values)[name]

    @property
    def layout(self) -> tuple[int, int, int]:
        """Sizes of tensor, pipeline and data parallelism; 1: not an axis."""
        values = dict(self.values)
        tensor, stages, replicas = (values.get(name, 1) for name in LAYOUT)
        return tensor, stages, replicas

    @property
    def num_ranks(self) -> int:
        """GPUs of a replica."""
        return self.layout[0] * self.layout[1]

    @property
    def num_gpus(self) -> int:
        return self.num_ranks * self.layout[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """The options that all settings of a command share. flags: as text, by name."""

    config: Path | None
    flags: Mapping[str, object]

    def options(self, more: Mapping[str, object] | None = None) -> Options:
        """more: options on top. Raises ConfigError for values that do not go together."""
        return load_options(self.config, {**self.flags, **(more or {})})


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of the axes' values: AXES in their order, then any other options."""
    names = sorted(axes, key=lambda name: AXES.index(name) if name in AXES else len(AXES))
    return [Setting(tuple(zip(names, values, strict=True))) for values in itertools.product(*(axes[n] for n in names))]


def parse_axis(text: str, name: str) -> tuple[Any, ...]:
    """Parses the values of one of AXES, such as 64,128. Raises TuningError."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    flag = f"--{name.replace('_', '-')}"
    if name in _TEXT:
        if not parts:
            raise TuningError(f"{flag}={text!r}: give names with commas, such as {OFF},suffix")
        return parts
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise TuningError(f"{flag}={text!r} is not a list of numbers above 0, such as 64,128,256")
    return tuple(map(int, parts))


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
