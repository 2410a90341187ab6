"""Writes the tables of docs/models.md from what the grid of models has found."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from worker.models.registry import ARCHITECTURES

# The page up to this heading is written by hand.
_FIRST = "## Own families\n"


class Found(Protocol):
    @property
    def model_type(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def refused(self) -> str: ...
    @property
    def error(self) -> float: ...
    @property
    def wrong(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


def write_page(path: Path, lines: Sequence[Found]) -> None:
    by_name = {line.name: line for line in lines}
    computed = sorted((each for each in by_name.values() if not each.refused and not each.wrong), key=lambda e: e.name)
    refused = sorted((each for each in by_name.values() if each.refused and not each.is_own), key=lambda e: e.name)
    text = [
        path.read_text(encoding="utf-8").partition(_FIRST)[0] + _FIRST,
        "\n".join(f"- `{name}`" for name in ARCHITECTURES) + "\n",
        f"## Computed by transformers {version('transformers')}\n",
        f"{len(computed)} classes, each checked with a tiny random model in float32 by",
        "`python -m benchmarks.engine.library.grid --tensor-parallel`. The error is max |a - b| / max |b| of logits",
        "and log-probabilities. Ranks: tensor-parallel sizes that were run. Own families are computed that way with",
        "`model_impl: transformers` only.\n",
        "| architecture | model_type | own family | error | ranks |",
        "|---|---|---|---|---|",
        *(
            f"| `{each.name}` | {each.model_type} | {'yes' if each.is_own else ''} | {each.error:.0e} "
            f"| {', '.join(map(str, each.ranks))} |"
            for each in computed
        ),
        "\n## Refused\n",
        "| architecture | model_type | reason |",
        "|---|---|---|",
        *(f"| `{each.name}` | {each.model_type} | {_cell(each.refused)} |" for each in refused),
    ]
    path.write_text("\n".join(text) + "\n")


def _cell(reason: str) -> str:
    return " ".join(reason.replace("|", "/").split())[:200]
