"""Draws what a tuning run found, as SVG that stands in a page by itself."""

import io
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.tune.bounds import Bounds
from octavo.tune.search.results import Found, Row, Status

_COLORS = {
    Status.BEST: "#c44e52",
    Status.FINALIST: "#dd8452",
    Status.MEASURED: "#4c72b0",
    Status.SKIPPED: "#b0b0b0",
    Status.FAILED: "#000000",
}
_MOST_BARS = 40


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
    plot.set_yticks(places, [f"{row.candidate.label} ({row.status})" for row in rows], fontsize=8)
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
                    row.candidate.label,
                    (row.measured[key], row.measured["output_tok_s"]),
                    fontsize=6,
                    textcoords="offset points",
                    xytext=(4, 3),
                )
        if limit < float("inf"):
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
