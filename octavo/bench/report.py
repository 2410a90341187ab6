"""What a benchmark reports: for a program a JSON object a line, for a person a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

PERCENTILES = (50, 90, 99)


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request as its client saw it, in seconds of one clock; token_times has one entry a message with tokens."""

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
        """Inter-token latencies: the gaps between messages, each counted once for every token that it brought."""
        gaps = np.diff(self.token_times)
        return [gap / count for gap, count in zip(gaps, self.token_counts[1:], strict=True) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One measurement.

    Keys of `as_json`: engine, model, dtype, concurrency, prompt_len, output_len, num_requests, num_errors, duration_s,
    requests_s, output_tok_s, total_tok_s; and ttft_s, itl_ms, e2e_s: each a mean, and with _p50, _p90, _p99.
    """

    model: str
    dtype: str
    concurrency: int
    prompt_len: int
    output_len: int
    duration: float
    traces: Sequence[RequestTrace]
    # More keys, such as where a step's time went.
    extra: dict[str, object]

    def as_json(self) -> dict[str, object]:
        done = [trace for trace in self.traces if not trace.error]
        num_output = sum(trace.num_tokens for trace in done)
        values: dict[str, object] = {
            "engine": "octavo",
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
        values |= _summary("ttft_s", [trace.ttft for trace in done if trace.token_times], 1.0)
        values |= _summary("itl_ms", [gap for trace in done for gap in trace.itl], 1e3)
        values |= _summary("e2e_s", [trace.e2e for trace in done], 1.0)
        return values | self.extra


def _summary(key: str, seconds: Sequence[float], scale: float) -> dict[str, float | None]:
    """Mean and percentiles; None where there is nothing to measure."""
    names = [key, *(f"{key}_p{percent}" for percent in PERCENTILES)]
    if not len(seconds):
        return dict.fromkeys(names)
    values = [float(np.mean(seconds)), *map(float, np.percentile(seconds, PERCENTILES))]
    return {name: round(value * scale, 5) for name, value in zip(names, values, strict=True)}


def print_reports(reports: Sequence[Report], *, as_json: bool) -> None:
    """To stdout."""
    rows = [report.as_json() for report in reports]
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    table = Table(
        title=f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['prompt_len']} in / {rows[0]['output_len']} out"
    )
    for heading in ("concurrency", "output tok/s", "request/s", "TTFT s", "ITL ms", "e2e s", "errors"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["concurrency"]),
            f"{row['output_tok_s']:,}",
            str(row["requests_s"]),
            _cell(row, "ttft_s", 3),
            _cell(row, "itl_ms", 1),
            _cell(row, "e2e_s", 2),
            str(row["num_errors"]),
        )
    console = Console()
    console.print(table)
    console.print("latencies: mean (p50 / p90 / p99)", style="dim")
    for row, report in zip(rows, reports, strict=True):
        for key, value in report.extra.items():
            console.print(f"concurrency {row['concurrency']}: {key} {value}", style="dim", highlight=False)


def _cell(row: dict[str, object], key: str, digits: int) -> str:
    if row[key] is None:
        return "-"
    mean, *percentiles = (f"{row[name]:.{digits}f}" for name in (key, *(f"{key}_p{p}" for p in PERCENTILES)))
    return f"{mean} ({' / '.join(percentiles)})"
