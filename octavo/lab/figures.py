"""Figures that commands share: panels over the request rate, and files in the format of their suffix."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from configs.load import ConfigError

# By a panel's title: values over the rates, by label.
Panels = Mapping[str, Mapping[str, Sequence[float]]]


def draw_over_rates(path: Path, rates: Sequence[float], panels: Panels, *, title: str, flag: str) -> None:
    """Draws a line for each label over the rates, of which inf is a tick like others; bars if there is one rate.

    flag: the one that names the path, for errors. Raises ConfigError.
    """
    num_columns = -(-len(panels) // 2)
    figure = Figure(figsize=(5 * num_columns + 2, 8), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for place, (name, lines) in enumerate(panels.items(), 1):
        plot = figure.add_subplot(2, num_columns, place)
        if len(rates) == 1:
            plot.barh(range(len(lines)), [values[0] for values in lines.values()])
            plot.set_yticks(range(len(lines)), [*lines], fontsize=8)
            plot.invert_yaxis()
        else:
            for label, values in lines.items():
                plot.plot(range(len(rates)), values, marker="o", label=label)
            plot.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
            plot.set_xlabel("requests/s asked for")
            plot.set_ylim(bottom=0)
            plot.legend(fontsize=7)
        plot.set_title(name, fontsize=10)
        plot.grid(alpha=0.3)
    save(figure, path, flag)


def save(figure: Figure, path: Path, flag: str) -> None:
    """Writes a figure in the format of the path's suffix: png, svg or pdf. Raises ConfigError."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error}") from None
