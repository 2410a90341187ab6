"""Flags that are fields of a dataclass: what a command takes, in which order, and what it is given."""

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from octavo.lab.bounds import Bounds, as_measured
from octavo.lab.flags import flag, with_flags
from octavo.lab.settings import Setting, grid, parse_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    count: int = flag(3, "Numbers", "How many.", min=1)
    files: list[Path] | None = flag(None, None, "Files.", "--file", metavar="FILE")


def test_fields_are_flags_in_their_place_and_come_as_one_record() -> None:
    given: list[object] = []

    def command(*, before: str = "b", query: Flags, after: bool = False) -> None:
        given.append((before, query, after))

    app = typer.Typer()
    app.command()(with_flags(command))
    assert [*inspect.signature(with_flags(command)).parameters] == ["before", "count", "files", "after"]
    run = CliRunner()
    assert run.invoke(app, []).exit_code == 0
    assert run.invoke(app, ["--count", "5", "--file", "x", "--file", "y", "--after"]).exit_code == 0
    assert run.invoke(app, ["--count", "0"]).exit_code == 2
    assert given == [("b", Flags(), False), ("b", Flags(count=5, files=[Path("x"), Path("y")]), True)]


def test_a_grid_has_the_order_of_axes_whatever_order_is_given() -> None:
    axes = {"tensor_parallel_size": (1, 2), "max_num_seqs": parse_axis("8,4,8", "max_num_seqs"), "seed": (0,)}
    settings = grid(axes)
    assert [each.label for each in settings[:2]] == ["seqs 8, TP 1, seed 0", "seqs 8, TP 2, seed 0"]
    assert [(each.layout, each.num_ranks, each.num_gpus) for each in settings] == [
        ((1, 1, 1), 1, 1),
        ((2, 1, 1), 2, 2),
    ] * 2
    assert settings[0].engine == (("tensor_parallel_size", 1), ("seed", 0))
    assert Setting(settings[0].values) == settings[0]


@pytest.mark.parametrize(
    ("changes", "late", "broken"),
    [
        ({}, [], []),
        ({"ttft_s_p99": 0.6}, ["TTFT p99 600 ms is above 500"], ["TTFT p99 600 ms is above 500"]),
        ({"itl_ms_p99": None, "num_errors": 1}, [], ["1 of 9 requests failed"]),
        ({"prefix_hit_rate": 0.25}, [], ["prefix hit rate 25% is below 50%"]),
    ],
)
def test_bounds_are_judged_by_a_reports_numbers(changes: dict, late: list[str], broken: list[str]) -> None:
    times = {f"{name}_p{percent}": 0.4 for name in ("ttft_s", "itl_ms", "e2e_s") for percent in (50, 99)}
    counts = {"output_tok_s": 1.0, "requests_s": 1.0, "num_requests": 9, "num_errors": 0}
    numbers = as_measured({**times, **counts, "prefix_hit_rate": 0.5, "duration_s": 1.0, **changes})
    bounds = Bounds(ttft_ms=500.0, itl_ms=50.0, min_hit_rate=0.5)
    assert (bounds.late(numbers), bounds.broken_by(numbers)) == (late, broken)
    assert (bounds.excess(numbers) <= 1.0) == (not broken)
