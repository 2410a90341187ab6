"""GPU benchmarks in processes of their own, and what their shares are taken of."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.processes import results
from benchmarks.gpu.report import Missing, Report, failed
from benchmarks.gpu.yardsticks import copy_of, random_numbers, sums_of
from tests.support.gpu.gpu import DEVICE
from tests.support.repository import ROOT

_FIRST = "def run(report, *, toy):\n    report.row('first', 'case', 'way', 1.0)\n"
# Does what a failed capture did on 2026-11-26: later users of random numbers fail, in the same process.
_POISONED = """
import os, torch
def run(report, *, toy):
    report.row('poisoned', 'before', 'way', 1.0)
    def no_more(*arguments, **options):
        raise RuntimeError('Offset increment outside graph capture encountered unexpectedly.')
    torch.randn = no_more
    {end}
"""
_LAST = "import torch\ndef run(report, *, toy):\n    report.row('last', str(torch.randn(2).shape[0]), 'way', 1.0)\n"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("torch.randn(2)", "RuntimeError: Offset increment outside graph capture encountered unexpectedly."),
        ("os.abort()", "the process died of signal 6"),
    ],
)
def test_an_op_that_fails_in_the_middle_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, reason: str
) -> None:
    sources = {"op_first": _FIRST, "op_poisoned": _POISONED.format(end=end), "op_last": _LAST}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    asked: list[int] = []

    def seconds_of(index: int) -> float:
        asked.append(index)
        return 100.0

    found = [result["rows"] for result in results([*sources], seconds_of, toy=True)]
    assert asked == [0, 1, 2], "each is given its time when its turn comes"
    assert [row["op"] for row in found[0]] == ["first"]
    assert [row.get("failed") for row in found[1]] == [None, reason], "rows from before the failure stay"
    assert found[2] == [{"op": "last", "case": "2", "way": "way", "ms": 1.0}]
    assert failed([row for rows in found for row in rows]) == ["op_poisoned"]


def test_run_all_refuses_a_name_that_is_none() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--toy", "--only", "rope,no_such_op"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--only no_such_op: must be among" in done.stderr


def test_yardsticks_copy_and_read_everything() -> None:
    numbers = random_numbers(4 * 200_001, DEVICE)
    assert len(numbers.unique()) > 199_000, "zeros would run faster"
    traffic, target = copy_of(numbers)
    traffic.call()
    assert torch.equal(target, numbers)
    assert traffic.num_bytes == 2 * 4 * 200_001
    traffic, sums = sums_of(numbers)
    traffic.call()
    assert (int(sums.long().sum()) - int(numbers.long().sum())) % 2**32 == 0
    assert traffic.num_bytes == 4 * 200_001


def test_yardsticks_are_timed_by_events_not_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in a graph ran at 0.65 of its speed by events: shares of it were 1.53 times too high."""
    report = Report(toy=True, device=DEVICE, deadline=float("inf"))
    by_graph: list[bool] = []

    def milliseconds(call: object, *, by_graph: bool = True, asked: list[bool] = by_graph) -> float:
        asked.append(by_graph)
        return 2.0

    monkeypatch.setattr(report, "milliseconds", milliseconds)
    num_bytes = 1 << 12
    assert report.share_of_copy(num_bytes, 1.0) == pytest.approx(1.0)
    assert report.share_of_reads(num_bytes, 1.0) == pytest.approx(2.0)
    report.share_of_copy(num_bytes, 1.0)
    assert by_graph == [False, False], "each yardstick is measured once"
    assert [row["op"] for row in report.rows] == ["yardstick", "yardstick"]


def test_variants_are_timed_in_turn_and_a_missing_one_is_named() -> None:
    report = Report(toy=True, device=DEVICE, deadline=float("inf"))
    calls: list[str] = []

    def variant(name: str, value: float):
        def call() -> torch.Tensor:
            calls.append(name)
            return torch.full((2,), value)

        return lambda: call

    def missing():
        raise Missing("this tree has no such tile")

    report.compare("op", "case", {"old": variant("old", 1.0), "none": missing, "new": variant("new", 1.5)})
    assert [(row["way"], row.get("missing")) for row in report.rows] == [
        ("none", "this tree has no such tile"),
        ("old", None),
        ("new", None),
    ]
    assert [row["off"] for row in report.rows[1:]] == [0.0, 0.5]
    # Once for the results, then in turn, the first one again at the end.
    assert calls == ["old", "new", "old", "new", "old"]
    assert not report.failed
    assert "missing: this tree has no such tile" in report.table()
