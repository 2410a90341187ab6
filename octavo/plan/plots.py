"""Draws a plan's outcomes into one PNG."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from octavo.plan.errors import PlanError
from octavo.plan.grid import AXES, Limits, Outcome, violations
from octavo.plan.report import step_split
from octavo.plan.simulate import Run

_BEST, _WITHIN, _OVER = "#c44e52", "#4c72b0", "#b0b0b0"
_SHORT = {
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
}
# More points than this have no room for a label each.
_MAX_LABELS = 16
_MAX_BARS = 24

_Ran = Sequence[tuple[Outcome, Run]]


def draw(path: Path, outcomes: Sequence[Outcome], limits: Limits, best: Outcome | None, *, title: str) -> None:
    """Throughput against latency; over two axes of the grid as a map, if it has them; and where steps spend their time.

    Raises PlanError if no setting ran, or the file cannot be written.
    """
    ran = [(outcome, outcome.run) for outcome in outcomes if outcome.run]
    if not ran:
        raise PlanError("--plot: no setting fits, so there is nothing to draw")
    axes = [axis for axis in AXES if len({getattr(outcome.setting, axis) for outcome, _ in ran}) > 1]
    has_maps = len(axes) >= 2
    figure = Figure(figsize=(13, 13.5 if has_maps else 9.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(3 if has_maps else 2, 2)
    _scatter(figure.add_subplot(grid[0, 0]), ran, axes, limits, best, "ITL p99, ms", lambda run: run.gaps)
    _scatter(figure.add_subplot(grid[0, 1]), ran, axes, limits, best, "TTFT p99, ms", lambda run: run.ttft)
    if has_maps:
        _map(figure.add_subplot(grid[1, 0]), ran, axes, "output tokens/s", lambda run: run.output_tokens_per_second)
        _map(figure.add_subplot(grid[1, 1]), ran, axes, "ITL p99, ms", lambda run: run.percentile_ms(run.gaps))
    _split(figure.add_subplot(grid[-1, :]), ran, axes)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot: cannot write {path}: {error}") from None


def _label(outcome: Outcome, axes: Sequence[str]) -> str:
    return " ".join(f"{_SHORT[axis]} {getattr(outcome.setting, axis)}" for axis in axes)


def _scatter(
    plot: Axes,
    ran: _Ran,
    axes: Sequence[str],
    limits: Limits,
    best: Outcome | None,
    name: str,
    column: Callable[[Run], np.ndarray],
) -> None:
    latencies = [run.percentile_ms(column(run)) for _, run in ran]
    rates = [run.output_tokens_per_second for _, run in ran]
    colors = [_BEST if o is best else _OVER if violations(run, limits) else _WITHIN for o, run in ran]
    plot.scatter(latencies, rates, c=colors, s=45, zorder=3)
    # Those that no other beats in both.
    order = np.argsort(latencies)
    front = [i for n, i in enumerate(order) if rates[i] > max((rates[j] for j in order[:n]), default=0.0)]
    plot.plot([latencies[i] for i in front], [rates[i] for i in front], color=_WITHIN, alpha=0.4, linewidth=1)
    for i, (outcome, _) in enumerate(ran):
        if len(ran) <= _MAX_LABELS or i in front or outcome is best:
            text = _label(outcome, axes)
            plot.annotate(text, (latencies[i], rates[i]), textcoords="offset points", xytext=(6, 4), fontsize=7)
    limit = limits.itl_ms if name.startswith("ITL") else limits.ttft_ms
    if limit is not None:
        plot.axvline(limit, color=_BEST, linestyle="--", linewidth=1, label="limit")
        plot.legend(fontsize=8)
    if max(latencies) > 20 * max(min(latencies), 1e-9) > 0:
        plot.set_xscale("log")
    else:
        plot.set_xlim(left=0)
    plot.margins(x=0.15)
    plot.set_ylim(bottom=0, top=max(rates) * 1.12)
    plot.set_xlabel(name)
    plot.set_ylabel("output tokens/s")
    plot.grid(alpha=0.3)


def _map(plot: Axes, ran: _Ran, axes: Sequence[str], name: str, value: Callable[[Run], float]) -> None:
    """Over the two axes with the most values; of settings that differ in others the first one is shown."""
    x_axis, y_axis = sorted(axes, key=lambda axis: -len({getattr(o.setting, axis) for o, _ in ran}))[:2]
    xs = sorted({getattr(outcome.setting, x_axis) for outcome, _ in ran})
    ys = sorted({getattr(outcome.setting, y_axis) for outcome, _ in ran})
    values = np.full((len(ys), len(xs)), np.nan)
    for outcome, run in reversed(ran):
        values[ys.index(getattr(outcome.setting, y_axis)), xs.index(getattr(outcome.setting, x_axis))] = value(run)
    image = plot.imshow(values, cmap="viridis", origin="lower", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (y, x), number in np.ndenumerate(values):
        text = "-" if np.isnan(number) else f"{number:,.4g}"
        plot.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if number < middle else "black")
    plot.set_xticks(range(len(xs)), [f"{x:,}" for x in xs])
    plot.set_yticks(range(len(ys)), [f"{y:,}" for y in ys])
    plot.set_xlabel(x_axis)
    plot.set_ylabel(y_axis)
    others = [f"{axis}={getattr(ran[0][0].setting, axis)}" for axis in axes if axis not in (x_axis, y_axis)]
    plot.set_title(name + (f" ({', '.join(others)})" if others else ""), fontsize=10)
    figure = plot.figure
    assert isinstance(figure, Figure)
    figure.colorbar(image, ax=plot)


def _split(plot: Axes, ran: _Ran, axes: Sequence[str]) -> None:
    shown = ran[:_MAX_BARS]
    names = [_label(outcome, axes) or "all steps" for outcome, _ in shown]
    left = np.zeros(len(shown))
    splits = [step_split(run) for _, run in shown]
    for part in shown[0][1].part_seconds:
        shares = np.array([split.get(part, 0.0) for split in splits])
        if shares.any():
            plot.barh(range(len(shown)), shares, left=left, label=part, height=0.7)
            left += shares
    plot.set_yticks(range(len(shown)), names, fontsize=8)
    plot.invert_yaxis()
    plot.set_xlim(0, 1)
    plot.xaxis.set_major_formatter(PercentFormatter(1.0))
    more = f", the first {len(shown)} of {len(ran)} settings" if len(shown) < len(ran) else ""
    plot.set_title(f"where the time of a step goes{more}", fontsize=10)
    plot.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
