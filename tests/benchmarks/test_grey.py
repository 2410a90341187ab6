"""The parts of benchmarks.faults.chaos --grey that judge: gaps of streams, totals, and what runs were made before."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.grey.kinds import FAULTS
from benchmarks.faults.grey.report import append_results, read_results, table
from benchmarks.faults.grey.run import Result, injections
from benchmarks.faults.grey.verdict import Verdict, gaps


def verdict(*arrivals: float, began: float = 0.0, ended: float = 10.0) -> Verdict:
    return Verdict(
        number=0,
        is_sampled=False,
        began=began,
        ended=ended,
        arrivals=list(arrivals),
        is_lost=False,
        is_duplicated=False,
        found=[],
    )


def result(kind: str = "stop-worker", **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "kind": kind,
        "number": 0,
        "seconds": 2.0,
        "victims": ["worker 0.1"],
        "note": "",
        "num_streams": 6,
        "num_sampled": 3,
        "num_lost": 0,
        "num_duplicated": 0,
        "num_different": 0,
        "gaps": [0.1, 2.5],
        "restarted": [],
        "unexpected": [],
        "lasted": 3.0,
    }
    return Result(**fields | changes)


@pytest.mark.parametrize(
    ("arrivals", "window", "gap"),
    [
        ((1.0, 2.0, 9.0), (3.0, 4.0), 7.0),
        ((1.0, 2.0, 9.0), (0.5, 1.5), 1.0),
        ((6.0,), (1.0, 2.0), 6.0),
        ((1.0,), (5.0, 6.0), 9.0),
    ],
)
def test_the_longest_gap_is_one_that_overlaps_the_fault(
    arrivals: tuple[float, ...], window: tuple[float, float], gap: float
) -> None:
    assert verdict(*arrivals).longest_gap(*window) == gap


def test_only_streams_that_lived_during_the_fault_count() -> None:
    assert gaps([verdict(ended=2.0), verdict(began=8.0), verdict(4.0)], 3.0, 5.0) == [6.0]


def test_a_process_restarted_without_need_and_a_lost_stream_spoil_a_result() -> None:
    assert result(restarted=["worker 0.1"]).is_clean
    spoilers: list[dict[str, Any]] = [
        {"num_lost": 1},
        {"num_duplicated": 1},
        {"num_different": 1},
        {"restarted": ["router 0"], "unexpected": ["router 0"]},
    ]
    assert not any(result(**each).is_clean for each in spoilers)


def test_results_continue_in_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    append_results(path, [result()])
    append_results(path, [result("clock", restarted=["scheduler 1", "worker 0.0"])])
    assert [each.kind for each in read_results(path)] == ["stop-worker", "clock"]
    shown = table(read_results(path))
    assert "all 2 kinds" in shown
    assert "1 scheduler, 1 worker" in shown


def test_lengths_are_drawn_by_seed_and_within_bounds() -> None:
    drawn = injections(list(FAULTS.values()), 10, 3, longest=15.0)
    assert drawn == injections(list(FAULTS.values()), 10, 3, longest=15.0)
    assert all(each.fault.seconds[0] <= each.seconds <= 15.0 for each in drawn)
    assert len({each.seconds for each in drawn if each.fault.name == "stop-worker"}) == 10
    assert FAULTS["stop-worker"].draw_seconds(random.Random(0), 1.0) == 2.0


def test_there_are_all_kinds_that_are_promised() -> None:
    for subject in ("stop-", "slow-", "net-", "disk-", "descriptors-", "clock", "memory-"):
        assert any(name.startswith(subject) for name in FAULTS), subject
    assert len(FAULTS) >= 12
