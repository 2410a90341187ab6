"""Results of grey failures: a file of JSON lines that a later run continues, and a table."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.faults.grey.run import Result


def read_results(path: Path) -> list[Result]:
    """Reads the results of earlier runs; none if there is no file."""
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines() if line]


def append_results(path: Path, results: Iterable[Result]) -> None:
    with path.open("a") as file:
        for each in results:
            file.write(as_line(each) + "\n")


def as_line(result: Result) -> str:
    return json.dumps(result.as_json())


def table(results: Sequence[Result]) -> str:
    """A row a kind, and a row of totals. Streams count once for each fault that they lived through."""
    lines = [
        "fault                       times  streams  sampled  lost  twice  differ  tokenless p50, max (s)  restarted",
    ]
    kinds = dict.fromkeys(each.kind for each in results)
    for kind in kinds:
        lines.append(_row(kind, [each for each in results if each.kind == kind]))
    lines.append(_row(f"all {len(kinds)} kinds", results))
    lines += [
        f"{each.kind} {each.number}: {name} was restarted without need" for each in results for name in each.unexpected
    ]
    lines += [f"{each.kind} {each.number}: {text}" for each in results for text in each.found]
    return "\n".join(lines)


def _row(name: str, results: Sequence[Result]) -> str:
    gaps = [gap for each in results for gap in each.gaps]
    p50, longest = (statistics.median(gaps), max(gaps)) if gaps else (0.0, 0.0)
    return (
        f"{name:27} {len(results):5} {_sum(results, 'num_streams'):8} {_sum(results, 'num_sampled'):8} "
        f"{_sum(results, 'num_lost'):5} {_sum(results, 'num_duplicated'):6} {_sum(results, 'num_different'):7} "
        f"{f'{p50:.1f}, {longest:.1f}':>22}  {_restarted(results)}"
    )


def _sum(results: Sequence[Result], name: str) -> int:
    return sum(getattr(each, name) for each in results)


def _restarted(results: Sequence[Result]) -> str:
    """The kinds of processes that were replaced, with how often."""
    kinds = Counter(name.rstrip("0123456789.").strip() for each in results for name in each.restarted)
    return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items()) or "nothing"
