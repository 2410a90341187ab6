"""Writes docs/models.md from what the grid of models has found."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from worker.models.registry import ARCHITECTURES

_TOP = """# Models

This page lists the architectures that Octavo computes: those of own families, those that the modules of transformers
compute, and those that are refused, with the reason. An architecture is the name in a model's `config.json`.

`model_impl` chooses: `octavo` takes an own family, `transformers` the modules of the installed transformers, and `auto`
(the default) an own family if there is one, else transformers. Through transformers, a model's rope, activations and
routing are the library's; linear layers, RMS norms, experts, embeddings, the head and paged attention are Octavo's.
Results are as exact as those of own families: a token's bits do not depend on other requests, on chunks or on cached
prefixes. It runs on CPUs, on tensor-parallel ranks where the library has a plan for the model, and in pipeline stages.
What the table below refuses is refused before any weight is read. Code beside the weights (`auto_map`) is never run.
"""


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
        _TOP,
        "## Own families\n",
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
