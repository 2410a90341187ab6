"""Draws measurements at several request rates: throughput, goodput and latencies over the rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.load import ConfigError

# (title, keys of reports); the first that all have are drawn.
_PANELS = (
    ("output tokens/s", ("output_tok_s",)),
    ("requests/s", ("requests_s", "goodput_requests_s")),
    ("first token, s", ("ttft_s_p50", "ttft_s_p99")),
    ("between tokens, ms", ("itl_ms_p50", "itl_ms_p99")),
    ("whole request, s", ("e2e_s_p50", "e2e_s_p99")),
)


def draw_rates(path: Path, reports: Sequence[Mapping[str, object]], *, title: str) -> None:
    """Draws a line per key over the request rate; a rate of inf is the last tick. Raises ConfigError."""
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=12)
    ticks = [str(report["request_rate"]) for report in reports]
    for place, (name, keys) in enumerate(_PANELS, 1):
        _lines(figure.add_subplot(2, 3, place), name, keys, ticks, reports)
    save(figure, path, "--plot")


def _lines(
    plot: Axes, name: str, keys: Sequence[str], ticks: list[str], reports: Sequence[Mapping[str, object]]
) -> None:
    for key in keys:
        values = [report.get(key) for report in reports]
        if all(isinstance(value, int | float) for value in values):
            plot.plot(range(len(ticks)), values, marker="o", label=key)  # type: ignore[arg-type]
    plot.set_xticks(range(len(ticks)), ticks)
    plot.set_xlabel("requests/s asked for")
    plot.set_title(name, fontsize=10)
    plot.set_ylim(bottom=0)
    plot.grid(alpha=0.3)
    plot.legend(fontsize=8)


def save(figure: Figure, path: Path, flag: str) -> None:
    """Writes a figure in the format of the path's suffix: png, svg or pdf. Raises ConfigError."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error}") from None
