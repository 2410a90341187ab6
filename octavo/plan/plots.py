"""Draws a plan's outcomes into one PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from octavo.lab.bounds import Bounds
from octavo.lab.errors import PlanError
from octavo.lab.figures import save
from octavo.lab.settings import SHORT
from octavo.plan.grid import Outcome
from octavo.plan.report import axes_that_differ, step_split

_BEST, _WITHIN, _OVER = "#c44e52", "#4c72b0", "#b0b0b0"
_MAX_BARS = 24
# Points closer than this fraction of the plot get one label.
_SAME_PLACE = 0.025


def draw(path: Path, outcomes: Sequence[Outcome], limits: Bounds, best: Outcome | None, *, title: str) -> None:
    """Draws throughput against latency, a map over two axes of the grid if it has two, and how steps spend their time.

    Raises PlanError if no setting ran, and ConfigError if the file cannot be written.
    """
    ran = [outcome for outcome in outcomes if outcome.run]
    if not ran:
        raise PlanError("--plot: no setting fits, so there is nothing to draw")
    axes = axes_that_differ(ran)
    has_maps = len(axes) >= 2
    figure = Figure(figsize=(13, 13.5 if has_maps else 9.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(3 if has_maps else 2, 2)
    _scatter(figure.add_subplot(grid[0, 0]), ran, best, "ITL p99, ms", "itl_ms_p99", limits.itl_ms)
    _scatter(figure.add_subplot(grid[0, 1]), ran, best, "TTFT p99, ms", "ttft_ms_p99", limits.ttft_ms)
    if has_maps:
        cells = _Cells(ran, axes)
        cells.draw(figure.add_subplot(grid[1, 0]), "output tokens/s", "output_tok_s")
        cells.draw(figure.add_subplot(grid[1, 1]), "ITL p99, ms", "itl_ms_p99")
    _split(figure.add_subplot(grid[-1, :]), ran, axes)
    save(figure, path, "--plot")


def _scatter(plot: Axes, ran: Sequence[Outcome], best: Outcome | None, name: str, key: str, limit: float) -> None:
    """Draws a point per setting, labelled with its number in the chart below."""
    points = np.array([(each.numbers[key], each.numbers["output_tok_s"]) for each in ran])
    colors = [_BEST if each is best else _OVER if each.late else _WITHIN for each in ran]
    plot.scatter(*points.T, c=colors, s=45, zorder=3)
    # The Pareto front: no other point is better in both.
    order = np.lexsort((-points[:, 1], points[:, 0]))
    front = [i for n, i in enumerate(order) if points[i, 1] > max(points[order[:n], 1], default=0.0)]
    plot.plot(*points[front].T, color=_WITHIN, alpha=0.4, linewidth=1)
    if math.isfinite(limit):
        plot.axvline(limit, color=_BEST, linestyle="--", linewidth=1, label="limit")
        plot.legend(fontsize=8)
    plot.margins(0.12)
    size = np.maximum(np.ptp(points, axis=0), 1e-9)
    unlabelled = list(range(len(points)))
    while unlabelled:
        place = points[unlabelled[0]]
        here = [i for i in unlabelled if (abs(points[i] - place) < _SAME_PLACE * size).all()]
        unlabelled = [i for i in unlabelled if i not in here]
        text = ", ".join(str(i + 1) for i in here)
        plot.annotate(text, place, textcoords="offset points", xytext=(6, 4), fontsize=9)
    plot.set_xlabel(name)
    plot.set_ylabel("output tokens/s")
    plot.set_title("red: the best within the limits; gray: beyond them", fontsize=9)
    plot.grid(alpha=0.3)


class _Cells:
    """A map over the two axes with the most values. Each cell shows its setting with the most throughput."""

    def __init__(self, ran: Sequence[Outcome], axes: Sequence[str]) -> None:
        def values_of(axis: str) -> list[int]:
            return sorted({outcome.setting.value(axis) for outcome in ran})

        self._x_axis, self._y_axis = sorted(axes, key=lambda axis: -len(values_of(axis)))[:2]
        self._xs, self._ys = values_of(self._x_axis), values_of(self._y_axis)
        self._best: dict[tuple[int, int], Outcome] = {}
        for outcome in sorted(ran, key=lambda outcome: outcome.numbers["output_tok_s"]):
            x, y = outcome.setting.value(self._x_axis), outcome.setting.value(self._y_axis)
            self._best[self._ys.index(y), self._xs.index(x)] = outcome
        others = [axis for axis in axes if axis not in (self._x_axis, self._y_axis)]
        self._note = f" (with the best {', '.join(others)})" if len(self._best) < len(ran) else ""

    def draw(self, plot: Axes, name: str, key: str) -> None:
        values = np.full((len(self._ys), len(self._xs)), np.nan)
        for cell, outcome in self._best.items():
            values[cell] = outcome.numbers[key]
        image = plot.imshow(values, cmap="viridis", origin="lower", aspect="auto")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (y, x), number in np.ndenumerate(values):
            text = "-" if np.isnan(number) else f"{number:,.4g}"
            plot.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if number < middle else "black")
        plot.set_xticks(range(len(self._xs)), [f"{x:,}" for x in self._xs])
        plot.set_yticks(range(len(self._ys)), [f"{y:,}" for y in self._ys])
        plot.set_xlabel(self._x_axis)
        plot.set_ylabel(self._y_axis)
        plot.set_title(name + self._note, fontsize=10)
        plot.figure.colorbar(image, ax=plot)


def _split(plot: Axes, ran: Sequence[Outcome], axes: Sequence[str]) -> None:
    shown = ran[:_MAX_BARS]
    labels = [" ".join(f"{SHORT[axis]} {each.setting.value(axis)}" for axis in axes) for each in shown]
    names = [f"{number} {label}".strip() for number, label in enumerate(labels, 1)]
    left = np.zeros(len(shown))
    splits = [step_split(each.run) for each in shown if each.run]
    for part in dict.fromkeys(part for split in splits for part in split):
        shares = np.array([split.get(part, 0.0) for split in splits])
        plot.barh(range(len(shown)), shares, left=left, label=part, height=0.7)
        left += shares
    plot.set_yticks(range(len(shown)), names, fontsize=8)
    plot.invert_yaxis()
    plot.set_xlim(0, 1)
    plot.xaxis.set_major_formatter(PercentFormatter(1.0))
    more = f", the first {len(shown)} of {len(ran)} settings" if len(shown) < len(ran) else ""
    plot.set_title(f"where the time of a step goes{more}", fontsize=10)
    plot.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=8, fontsize=9, frameon=False)
