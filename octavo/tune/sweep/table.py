"""Measures every combination of values of options, at every rate, into a table and a plot.

As vLLM's `bench sweep serve`: a cluster for each combination, on which the rates are measured in turn.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from octavo.bench.plots import save
from octavo.tune.progress import Watcher
from octavo.tune.space import Candidate
from octavo.tune.trials.clusters import TrialFailed
from octavo.tune.trials.trials import Trials

TABLE, PLOT = "sweep.csv", "sweep.png"
_PANELS = (
    ("output tokens/s", "output_tok_s"),
    ("first token p99, ms", "ttft_ms_p99"),
    ("between tokens p99, ms", "itl_ms_p99"),
    ("whole request p99, ms", "e2e_ms_p99"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A measurement; error: why there is none."""

    candidate: Candidate
    rate: float
    run: int
    numbers: dict[str, Any]
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        rate = "inf" if self.rate == math.inf else self.rate
        return {
            **dict(self.candidate.values),
            "request_rate": rate,
            "run": self.run,
            **self.numbers,
            "error": self.error,
        }


def sweep(
    candidates: Sequence[Candidate], rates: Sequence[float], num_runs: int, trials: Trials, watcher: Watcher
) -> list[SweepRow]:
    """Measures num_runs times, the settings in turn, so that a machine's slow minutes meet all of them."""
    rows: list[SweepRow] = []
    num_trials = num_runs * len(candidates)
    for run in range(num_runs):
        for candidate in candidates if run % 2 == 0 else reversed(candidates):
            watcher.expect(num_trials)
            watcher.begin(f"run {run + 1}: {candidate.label}")
            num_trials -= 1
            error, measured = "", []
            try:
                measured = trials.several(candidate, [(f"run {run}", rate) for rate in rates])
            except TrialFailed as failure:
                error = str(failure)
                watcher.say(f"{candidate.label} fails: {error}")
            for number, rate in enumerate(rates):
                numbers = (
                    {name: value for name, value in measured[number].items() if name != "seconds"} if measured else {}
                )
                rows.append(SweepRow(candidate=candidate, rate=rate, run=run, numbers=numbers, error=error))
    return rows


def write_table(path: Path, rows: Sequence[SweepRow]) -> None:
    """Writes a CSV file with a line for each measurement."""
    lines = [row.as_json() for row in rows]
    # A failed setting has no numbers.
    names = dict.fromkeys(name for line in lines for name in line if name != "error")
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*names, "error"])
        table.writeheader()
        table.writerows(lines)


def draw(path: Path, rows: Sequence[SweepRow], *, title: str) -> None:
    """Draws a line for each setting over the rates, through the medians of its runs; bars if there is one rate."""
    labels = list(dict.fromkeys(row.candidate.label for row in rows if row.numbers))
    rates = list(dict.fromkeys(row.rate for row in rows))
    figure = Figure(figsize=(14, 9), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for place, (name, key) in enumerate(_PANELS, 1):
        plot = figure.add_subplot(2, 2, place)
        for number, label in enumerate(labels):
            values = [_median(rows, label, rate, key) for rate in rates]
            if len(rates) == 1:
                plot.barh(number, values[0])
            else:
                plot.plot(range(len(rates)), values, marker="o", label=label)
        if len(rates) == 1:
            plot.set_yticks(range(len(labels)), labels, fontsize=8)
            plot.invert_yaxis()
        else:
            plot.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
            plot.set_xlabel("requests/s asked for")
            plot.set_ylim(bottom=0)
            plot.legend(fontsize=7)
        plot.set_title(name, fontsize=10)
        plot.grid(alpha=0.3)
    save(figure, path, "--output")


def _median(rows: Sequence[SweepRow], label: str, rate: float, key: str) -> float:
    values = sorted(
        row.numbers[key] for row in rows if row.candidate.label == label and row.rate == rate and row.numbers
    )
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
