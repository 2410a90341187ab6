"""The output of benchmarks and plans: a progress bar on stderr; on stdout one JSON object per line for programs, or
a table for people.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def progress_bar(label: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances the bar by a count. Shows nothing if hidden, or if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Few refreshes: the machine that is measured may be this one.
    bar = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=hidden or not console.is_terminal
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def progress_of(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that sets the bar, to the total and to how many are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda total, done: bar.update(task, total=total, completed=done)


PERCENTILES = (50, 90, 99)
_IN_TITLE = {"engine", "model", "dtype", "prompt_len", "output_len"}
_BOLD = {"concurrency", "batch_size", "latency_s", "output_tok_s", "ttft_s", "itl_ms", "e2e_s"}


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request as its client saw it, in seconds of one clock; token_times has one entry per message with tokens."""

    began: float
    token_times: list[float]
    # Output tokens of each message in token_times.
    token_counts: list[int]
    ended: float = 0.0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.began

    @property
    def e2e(self) -> float:
        return self.ended - self.began

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: each gap before a message, spread evenly over the message's tokens."""
        gaps = np.diff(self.token_times)
        return [gap / count for gap, count in zip(gaps, self.token_counts[1:], strict=True) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One measurement.

    Keys of `as_json`: engine, model, dtype, concurrency, prompt_len, output_len, num_requests, num_errors, duration_s,
    requests_s, output_tok_s, total_tok_s; ttft_s, itl_ms and e2e_s, each as a mean and with _p50, _p90, _p99; then
    the keys of `extra`.
    """

    model: str
    # Empty: not known.
    dtype: str
    concurrency: int
    prompt_len: int
    output_len: int
    duration: float
    traces: Sequence[RequestTrace]
    # More keys, such as where a step's time went. Tables leave out values that are dicts.
    extra: dict[str, object]
    engine: str = "octavo"

    def as_json(self) -> dict[str, object]:
        done = [trace for trace in self.traces if not trace.error]
        num_output = sum(trace.num_tokens for trace in done)
        values: dict[str, object] = {
            "engine": self.engine,
            "model": self.model,
            "dtype": self.dtype,
            "concurrency": self.concurrency,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "num_requests": len(self.traces),
            "num_errors": len(self.traces) - len(done),
            "duration_s": round(self.duration, 4),
            "requests_s": round(len(done) / self.duration, 3),
            "output_tok_s": round(num_output / self.duration, 2),
            "total_tok_s": round((num_output + self.prompt_len * len(done)) / self.duration, 2),
        }
        values |= summary("ttft_s", [trace.ttft for trace in done if trace.token_times], 1.0)
        values |= summary("itl_ms", [gap for trace in done for gap in trace.itl], 1e3)
        values |= summary("e2e_s", [trace.e2e for trace in done], 1.0)
        return values | self.extra


def summary(key: str, seconds: Sequence[float] | np.ndarray, scale: float) -> dict[str, float | None]:
    """Mean and percentiles under `key`, `key`_p50 and so on; None where there is nothing to measure."""
    names = [key, *(f"{key}_p{percent}" for percent in PERCENTILES)]
    if not len(seconds):
        return dict.fromkeys(names)
    values = [float(np.mean(seconds)), *map(float, np.percentile(seconds, PERCENTILES))]
    return {name: round(value * scale, 5) for name, value in zip(names, values, strict=True)}


def print_json(values: Mapping[str, object]) -> None:
    """Prints one line to stdout and flushes it."""
    print(json.dumps(values), flush=True)


def print_reports(reports: Sequence[Report], *, as_json: bool) -> None:
    """Prints one JSON object per line, or one table with a column per report and a row per JSON key."""
    columns = [report.as_json() for report in reports]
    if as_json:
        for column in columns:
            print_json(column)
        return
    print_columns(columns, note="ttft, itl and e2e: mean, then percentiles over all requests")


def print_columns(columns: Sequence[Mapping[str, object]], *, note: str) -> None:
    """Prints a table with a column for each measurement and a row for each key, under the model's name and lengths."""
    first = columns[0]
    table = Table(show_header=False)
    # A key may be in some of them only.
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [column.get(key) for column in columns]
        # Dicts are for programs.
        if key not in _IN_TITLE and not any(isinstance(value, dict) for value in values):
            table.add_row(key, *map(_shown, values), style="bold" if key in _BOLD else None)
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console()
    # Printed above the table: as its title, it would be wrapped to the table's width.
    names = ", ".join(str(first[key]) for key in ("model", "dtype") if first[key])
    title = f"{names}, {first['prompt_len']} in / {first['output_len']} out"
    console.print(title, style="bold", highlight=False)
    console.print(table)
    console.print(note, style="dim")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 1000 else f"{value:.4g}"
    return str(value)
