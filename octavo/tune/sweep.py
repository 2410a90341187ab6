"""Measures every combination of values of options, at every rate, into a table and a plot.

As vLLM's `bench sweep serve`: a cluster for each combination, on which the rates are measured in turn.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.lab.figures import draw_over_rates
from octavo.lab.settings import Setting
from octavo.tune.progress import Progress
from octavo.tune.trials.clusters import TrialFailed
from octavo.tune.trials.trials import Trials

_PANELS = {
    "output tokens/s": "output_tok_s",
    "first token p99, ms": "ttft_ms_p99",
    "between tokens p99, ms": "itl_ms_p99",
    "whole request p99, ms": "e2e_ms_p99",
}
_SHOWN = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A measurement; error: why there is none."""

    setting: Setting
    rate: float
    run: int
    numbers: dict[str, Any]
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        rate = "inf" if self.rate == math.inf else self.rate
        return {
            **dict(self.setting.values),
            "request_rate": rate,
            "run": self.run,
            **self.numbers,
            "error": self.error,
        }


def sweep(
    settings: Sequence[Setting], rates: Sequence[float], num_runs: int, trials: Trials, watcher: Progress
) -> list[SweepRow]:
    """Measures num_runs times, the settings in turn, so that a machine's slow minutes meet all of them."""
    rows: list[SweepRow] = []
    num_trials = num_runs * len(settings)
    for run in range(num_runs):
        for setting in settings if run % 2 == 0 else reversed(settings):
            watcher.expect(num_trials)
            watcher.begin(f"run {run + 1}: {setting.label}")
            num_trials -= 1
            error, measured = "", []
            try:
                measured = [trials.measure(setting, f"run {run}", rate) for rate in rates]
            except TrialFailed as failure:
                error = str(failure)
                watcher.say(f"{setting.label} fails: {error}")
            finally:
                trials.close()
            for number, rate in enumerate(rates):
                numbers = dict(measured[number]) if measured else {}
                numbers.pop("seconds", None)
                rows.append(SweepRow(setting=setting, rate=rate, run=run, numbers=numbers, error=error))
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
    """Draws each setting over the rates, through the medians of its runs."""
    rates = list(dict.fromkeys(row.rate for row in rows))
    measured = [row for row in rows if row.numbers]
    labels = dict.fromkeys(row.setting.label for row in measured)
    panels = {
        name: {
            label: [
                median(row.numbers[key] for row in measured if (row.setting.label, row.rate) == (label, rate))
                for rate in rates
            ]
            for label in labels
        }
        for name, key in _PANELS.items()
    }
    draw_over_rates(path, rates, panels, title=title, flag="--output")


def print_rows(rows: Sequence[SweepRow]) -> None:
    table = Table(*("setting", "rate", "run", *_SHOWN))
    for row in rows:
        cells = [f"{row.numbers[name]:,.4g}" if row.numbers else "-" for name in _SHOWN]
        table.add_row(row.setting.label, f"{row.rate:g}", str(row.run + 1), *cells)
    Console().print(table)
