"""Sweeps: every combination at every rate, failures as lines, the table and the plot."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo.lab.errors import TuningError
from octavo.lab.journal import Journal
from octavo.lab.settings import Setting, grid, parse_assignments
from octavo.tune.progress import Progress
from octavo.tune.sweep import draw, sweep, write_table
from octavo.tune.trials.trials import Trials
from tests.support.scheduler.simulated_clusters import SimulatedClusters, cost_of, workload_of


def test_assignments_make_a_grid() -> None:
    values = parse_assignments(
        ["max_num_seqs=16,64", "max-num-batched-tokens=64", 'speculative_config={"method": "suffix", "x": 1}'], "--set"
    )
    assert values["speculative_config"] == ('{"method": "suffix", "x": 1}',)
    first, second = grid(values)
    assert first.options == {
        "max_num_seqs": "16",
        "max_num_batched_tokens": "64",
        "speculative_config": '{"method": "suffix", "x": 1}',
    }
    assert second.label == 'seqs 64, tokens 64, drafts {"method": "suffix", "x": 1}'
    for text in ("max_num_seqs", "seqs=3", "max_num_seqs=1,,2"):
        with pytest.raises(TuningError, match=f"--set={text!r}"):
            parse_assignments([text], "--set")


def test_every_setting_is_measured_at_every_rate_and_failures_are_lines(tmp_path: Path) -> None:
    def refuse(setting: Setting, memory: Mapping[str, float]) -> str:
        return "does not start" if setting.value("max_num_seqs") == "4" else ""

    clusters = SimulatedClusters(cost_of, refuse=refuse)
    settings = grid({"max_num_seqs": ("2", "4", "8")})
    workload = workload_of(prompt_len="30", output_len="8")
    for expected_starts in (6, 0):
        clusters.num_starts = 0
        journal = Journal(tmp_path / "state.jsonl", {}, advice="begin anew")
        rows = sweep(settings, [5.0, math.inf], 2, Trials(clusters, journal, workload), Progress(hidden=True))
        journal.close()
        # The failure is kept, too; in the second run everything is.
        assert clusters.num_starts <= expected_starts
    write_table(tmp_path / "sweep.csv", rows)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * 2 * 2
    assert {(line["max_num_seqs"], line["request_rate"]) for line in lines} == {
        (seqs, rate) for seqs in "248" for rate in ("5.0", "inf")
    }
    failed = [line for line in lines if line["error"]]
    assert {(line["max_num_seqs"], line["error"], line["output_tok_s"]) for line in failed} == {
        ("4", "does not start", "")
    }
    at_once = {
        line["max_num_seqs"]: float(line["output_tok_s"])
        for line in lines
        if line["request_rate"] == "inf" and not line["error"]
    }
    assert at_once["8"] > at_once["2"] > 0
    for name, chosen in (("rates.svg", rows), ("one.svg", [row for row in rows if row.rate == math.inf])):
        draw(tmp_path / name, chosen, title="a sweep")
        assert "seqs 8" in (tmp_path / name).read_text()
