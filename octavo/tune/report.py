"""The report of a tuning run: JSON for programs, a page with plots, a table for the terminal, and YAML to use."""

import html
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.lab.bounds import Bounds
from octavo.tune.search.results import Found, Row, Status

REPORT, PAGE, BEST = "report.json", "report.html", "best.yaml"
_NUMBERS = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 2px 10px; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child, td:last-child { text-align: left; }
tr.best { font-weight: bold; } tr.skipped, tr.failed { color: #888; } svg { max-width: 100%; height: auto; }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; }
"""
_COLORS = {
    Status.BEST: "#c44e52",
    Status.FINALIST: "#dd8452",
    Status.MEASURED: "#4c72b0",
    Status.SKIPPED: "#b0b0b0",
    Status.FAILED: "#000000",
}
_MOST_BARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """title: model and load, for people. options: those to use, by name; empty if no setting keeps the bounds.
    seconds: that measuring took. profile: the trace's file, or why there is none."""

    found: Found
    bounds: Bounds
    title: str
    options: Mapping[str, Any]
    seconds: float
    profile: str
    command: str

    def as_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "title": self.title,
            "command": self.command,
            "bounds": self.bounds.as_json(),
            "best": None if found.best is None else found.best.as_json(),
            "options": dict(self.options),
            "memory": dict(found.memory),
            "accuracy": found.accuracy(),
            "measured_in_s": round(self.seconds, 1),
            "profile": self.profile,
            "notes": found.notes,
            "settings": [row.as_json() for row in found.rows],
        }

    def write(self, folder: Path) -> None:
        (folder / REPORT).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        (folder / PAGE).write_text(self.page(), encoding="utf-8")
        if self.options:
            (folder / BEST).write_text(self.yaml(), encoding="utf-8")

    def yaml(self) -> str:
        return f"# {self.title}; found by `{self.command}`\n{yaml.safe_dump(dict(self.options), sort_keys=False)}"

    def page(self) -> str:
        found, escape = self.found, html.escape
        bounds = ", ".join(f"{name} {value:g}" for name, value in self.bounds.as_json().items()) or "none"
        predicted = found.accuracy()
        figures = [throughput(found), latencies(found, self.bounds), accuracy(found.rows)]
        best = f"<pre>{escape(self.yaml())}</pre>" if self.options else "<p>No setting keeps the bounds.</p>"
        errors = ", ".join(
            f"{name} {error:.0%}" for name, error in predicted["median_error"].items() if error is not None
        )
        return (
            f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>octavo tune</title><style>{_STYLE}</style>'
            f"<h1>octavo tune</h1><p>{escape(self.title)}<br><code>{escape(self.command)}</code><br>"
            f"bounds: {escape(bounds)}; measured for {self.seconds / 60:.1f} minutes</p>"
            f"<h2>Use</h2>{best}<p>Profile of its steps: {escape(self.profile)}</p>"
            f"<h2>Settings</h2>{_html_rows(found)}{figures[0]}{figures[1]}"
            f"<h2>Predictions</h2><p>{predicted['num_settings']} settings were predicted at the rate and the load at "
            f"which they were measured; median errors: {errors or 'none'}. "
            f"Of {predicted['pairs_that_differ']} pairs that differ by more than 10%, "
            f"{predicted['pairs_in_order']} were predicted in the right order.</p>{figures[2]}"
            f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in found.notes)}</ul></html>\n"
        )

    def print(self, console: Console) -> None:
        """Prints the settings that were measured, how many were skipped, and what to use."""
        console.print(self.title, style="bold", highlight=False)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("setting", no_wrap=True)
        for name in ("rate", "predicted", "tok/s", "TTFT", "ITL", "e2e"):
            table.add_column(name, justify="right")
        for row in _best_first(self.found):
            if row.measured:
                style = "bold" if row.status is Status.BEST else None
                pairs = [
                    f"{_ms(row.measured[f'{name}_ms_p50'])} / {_ms(row.measured[f'{name}_ms_p99'])}"
                    for name in ("ttft", "itl", "e2e")
                ]
                numbers = (_rate(row), _predicted_text(row), f"{row.value:,.4g}", *pairs)
                table.add_row(row.setting.label, *numbers, style=style)
        console.print(table)
        console.print("TTFT, ITL and e2e in ms: p50 / p99", style="dim", highlight=False)
        failed = [row for row in self.found.rows if row.status is Status.FAILED]
        for row in failed:
            console.print(f"failed: {row.setting.label}: {row.reason}", style="yellow", highlight=False)
        skipped = sum(row.status is Status.SKIPPED for row in self.found.rows)
        if skipped:
            console.print(f"{skipped} settings were skipped; the report says why", style="dim", highlight=False)


def _best_first(found: Found) -> list[Row]:
    order = [Status.BEST, Status.FINALIST, Status.MEASURED, Status.SKIPPED, Status.FAILED]
    return sorted(found.rows, key=lambda row: (order.index(row.status), -row.value))


def _html_rows(found: Found) -> str:
    names = ("setting", "status", "rate", "predicted tok/s", *_NUMBERS, "reason")
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    for row in _best_first(found):
        cells = (row.setting.label, row.status, _rate(row), _predicted_text(row), *_cells(row), row.reason)
        lines.append(f'<tr class="{row.status}">{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>')
    return f"<table>{''.join(lines)}</table>"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _rate(row: Row) -> str:
    return "-" if row.rate is None else f"{row.rate:.4g}"


def _predicted_text(row: Row) -> str:
    return "-" if row.prediction is None else f"{row.prediction.value:,.4g}"


def _cells(row: Row) -> list[str]:
    return [
        "-" if not row.measured else f"{row.value if name == 'output_tok_s' else row.measured[name]:,.4g}"
        for name in _NUMBERS
    ]


# --- Figures, as SVG that stands in a page by itself


def throughput(found: Found) -> str:
    """Bars of the predicted and the measured throughput within the bounds, best first."""
    rows = sorted(found.rows, key=lambda row: (-row.value, -_predicted(row)))[:_MOST_BARS]
    figure = Figure(figsize=(10, 1 + 0.32 * len(rows)), layout="constrained")
    plot = figure.add_subplot()
    places = range(len(rows))
    plot.barh(
        [y - 0.2 for y in places], [_predicted(row) for row in rows], height=0.36, color="#d5d5d5", label="predicted"
    )
    plot.barh(
        [y + 0.2 for y in places],
        [row.value for row in rows],
        height=0.36,
        color=[_COLORS[row.status] for row in rows],
        label="measured",
    )
    plot.set_yticks(places, [f"{row.setting.label} ({row.status})" for row in rows], fontsize=8)
    plot.invert_yaxis()
    plot.set_xlabel("output tokens/s within the bounds")
    plot.legend(fontsize=8)
    plot.grid(axis="x", alpha=0.3)
    return _svg(figure)


def latencies(found: Found, bounds: Bounds) -> str:
    """Throughput over the 99th percentiles of TTFT and ITL, of all settings that were measured."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for place, (name, key, limit) in enumerate(
        (("TTFT p99, ms", "ttft_ms_p99", bounds.ttft_ms), ("ITL p99, ms", "itl_ms_p99", bounds.itl_ms)), 1
    ):
        plot = figure.add_subplot(1, 2, place)
        for row in found.rows:
            if row.measured:
                plot.scatter(row.measured[key], row.measured["output_tok_s"], color=_COLORS[row.status], s=40)
                plot.annotate(
                    row.setting.label,
                    (row.measured[key], row.measured["output_tok_s"]),
                    fontsize=6,
                    textcoords="offset points",
                    xytext=(4, 3),
                )
        if math.isfinite(limit):
            plot.axvline(limit, color="#c44e52", linestyle="--", linewidth=1)
        plot.set_ylim(bottom=0)
        _name(plot, name, "output tokens/s")
    return _svg(figure)


def accuracy(rows: Sequence[Row]) -> str:
    """Measured over predicted numbers, at the rate and load of the measurement; empty if nothing has both."""
    both = [row for row in rows if row.expected and row.measured]
    if not both:
        return ""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for place, (name, key) in enumerate((("output tokens/s", "output_tok_s"), ("ITL p99, ms", "itl_ms_p99")), 1):
        plot = figure.add_subplot(1, 2, place)
        most = 1.05 * max(max(row.expected[key], row.measured[key]) for row in both)
        plot.plot((0, most), (0, most), color="#b0b0b0", linewidth=1)
        for row in both:
            plot.scatter(row.expected[key], row.measured[key], color=_COLORS[row.status], s=40)
        _name(plot, f"predicted {name}", "measured")
    return _svg(figure)


def _predicted(row: Row) -> float:
    return row.prediction.value if row.prediction else 0.0


def _name(plot: Axes, x: str, y: str) -> None:
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.grid(alpha=0.3)


def _svg(figure: Figure) -> str:
    """The <svg> element alone: without metadata and document type, which name other hosts."""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
