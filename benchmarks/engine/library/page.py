"""Writes the lists of docs/models.md from the findings of the grid of models."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from worker.models.registry import ARCHITECTURES

# The page up to this heading is written by hand.
_FIRST = "## Own families\n"


class Found(Protocol):
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
    computed = [each for each in by_name.values() if not each.refused and not each.wrong]
    worst = max(computed, key=lambda each: each.error)
    by_ranks, by_reason = defaultdict[tuple[int, ...], list[str]](list), defaultdict[str, list[str]](list)
    for each in computed:
        by_ranks[each.ranks].append(each.name)
    for each in by_name.values():
        if each.refused and not each.is_own:
            by_reason[_reason(each)].append(each.name)
    text = [
        path.read_text(encoding="utf-8").partition(_FIRST)[0] + _FIRST,
        _wrapped(_listed(ARCHITECTURES)),
        f"\n## Computed by transformers {version('transformers')}\n",
        _wrapped(
            f"{len(computed)} classes, each checked with a tiny random model in float32 by "
            "`python -m benchmarks.engine.library.grid --tensor-parallel`. The largest error of logits and "
            f"log-probabilities, max |a - b| / max |b|, is {worst.error:.0e} (`{worst.name}`). Own families are "
            "computed that way with `model_impl: transformers` only."
        ),
        *(
            f"\nTensor-parallel sizes {_sizes(ranks)}:\n\n{_wrapped(_listed(names))}"
            for ranks, names in sorted(by_ranks.items())
        ),
        "\n## Refused\n",
        *(
            _wrapped(f"- {reason.rstrip('.')}: {_listed(names)}", "  ")
            for reason, names in sorted(by_reason.items(), key=lambda each: (-len(each[1]), each[0]))
        ),
    ]
    path.write_text("\n".join(text) + "\n")


def _reason(line: Found) -> str:
    """The reason without the architecture's own name, so that architectures with one reason stand together."""
    return " ".join(line.refused.removeprefix(line.name).replace(line.name, "it").lstrip(": ").split())[:200]


def _sizes(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in sorted(names))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
