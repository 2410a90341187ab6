"""The report of a GPU benchmark: checks, times, a table for people and JSON for programs."""

import datetime
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.yardsticks import Traffic, copy_of, random_numbers, sums_of

_YARDSTICK = "yardstick"


class Missing(Exception):
    """A variant that this tree or this machine lacks. The message says what is lacking."""


@dataclass
class Report:
    """Collects the rows of one run. In toy mode, for the interpreter, everything is checked and nothing timed."""

    toy: bool
    # "cuda", or "cpu" under the interpreter.
    device: str
    # time.monotonic() at which to stop.
    deadline: float
    # Called after each part and each time, so that a process that is killed leaves its figures so far.
    save: Callable[["Report"], None] = lambda report: None
    # For files beside the rows; None: the parts choose.
    folder: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    _bandwidths: dict[str, float] = field(default_factory=dict)

    def has_time(self, seconds: float) -> bool:
        """Returns whether that much time is left; a benchmark asks before each row, and `skip`s what does not fit."""
        return time.monotonic() + seconds < self.deadline

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Limits the context to this share of the time that is left."""
        deadline, now = self.deadline, time.monotonic()
        self.deadline = now + max(0.0, deadline - now) * share
        try:
            yield
        finally:
            self.deadline = deadline

    def attempt(self, op: str, case: str, part: Callable[[], object]) -> bool:
        """Runs a part; returns whether it succeeded. If it raises, the error is printed and gets a row, and the other
        parts go on."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - printed in full, and in the exit status
            traceback.print_exc()
            reason = str(error).strip().partition("\n")[0]
            self.rows.append({"op": op, "case": case, "failed": f"{type(error).__name__}: {reason}"})
            return False
        finally:
            self.save(self)
        return True

    @property
    def failed(self) -> list[str]:
        """Parts that failed."""
        return failed(self.rows)

    def check(self, op: str, case: str, out: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float) -> None:
        """Raises AssertionError if `out` differs from `expected`; comes before any time of the case."""
        torch.testing.assert_close(out.double(), expected.double().to(out.device), rtol=rtol, atol=atol)
        self.rows.append({"op": op, "case": case, "checked": True})

    def milliseconds(self, call: Callable[[], object], *, by_graph: bool = True) -> float:
        """Median time of a call on the device, with a cold L2; toy mode calls once and returns NaN.

        by_graph: calls are captured in a CUDA graph, since launching them from Python can take longer than they do; a
        call that waits for the device, or copies between it and the host, cannot be captured.
        """
        if self.toy:
            call()
            return float("nan")
        if by_graph:
            return graphs_in_turn([call])[0]
        return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))  # pyright: ignore[reportArgumentType]

    def row(self, op: str, case: str, way: str, milliseconds: float, **figures: float) -> None:
        """Adds the time of one way to compute one case. figures: the time in other units: tflops, share_of_copy."""
        self.rows.append({"op": op, "case": case, "way": way, "ms": milliseconds, **figures})
        self.save(self)

    def note(self, op: str, case: str, found: str) -> None:
        """Adds something about the machine or the run that is not a time."""
        self.rows.append({"op": op, "case": case, "found": found})
        self.save(self)

    def missing(self, op: str, case: str, way: str, reason: str) -> None:
        """Adds a way that this tree or this machine lacks."""
        self.rows.append({"op": op, "case": case, "way": way, "missing": reason})

    def skip(self, op: str, case: str, reason: str) -> None:
        self.rows.append({"op": op, "case": case, "skipped": reason})

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a copy of 2 GiB by a kernel, by events; NaN in toy mode."""
        return self._bandwidth("copy by a kernel", copy_of)

    def read_bandwidth(self) -> float:
        """Bytes per second of reading 2 GiB and writing next to nothing, by events; NaN in toy mode."""
        return self._bandwidth("reads by a kernel", sums_of)

    def _bandwidth(self, case: str, traffic_of: Callable[[torch.Tensor], tuple[Traffic, torch.Tensor]]) -> float:
        if case not in self._bandwidths:
            traffic, _ = traffic_of(random_numbers(1 << 12 if self.toy else 2 << 30, self.device))
            milliseconds = self.milliseconds(traffic.call, by_graph=False)
            self._bandwidths[case] = traffic.num_bytes / (milliseconds / 1e3)
            self.row(_YARDSTICK, case, "events", milliseconds, tb_per_s=self._bandwidths[case] / 1e12)
        return self._bandwidths[case]

    def share_of_copy(self, num_bytes: int, milliseconds: float) -> float:
        """The bandwidth of reading or writing num_bytes, over that of a copy."""
        return num_bytes / (milliseconds / 1e3) / self.copy_bandwidth()

    def share_of_reads(self, num_bytes: int, milliseconds: float) -> float:
        """The bandwidth of reading num_bytes, over that of reads alone."""
        return num_bytes / (milliseconds / 1e3) / self.read_bandwidth()

    def compare(
        self,
        op: str,
        case: str,
        variants: Mapping[str, Callable[[], Callable[[], torch.Tensor]]],
        num_bytes: Mapping[str, int] | None = None,
        *,
        same_results: bool = True,
    ) -> None:
        """Times variants of one computation in turn, by graphs, so that a clock that changes slows all of them alike.

        variants: by name, what makes the call; it may raise Missing. The first one is timed twice: `again` says how far
        two times of the same call lie apart, below which a difference says nothing. `over_first`: time over that of the
        first variant that is there. num_bytes: by variant, for shares. same_results: adds `off`, the greatest
        difference from the first one's result.
        """
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        for name, make in variants.items():
            try:
                calls[name] = make()
            except Missing as missing:
                self.missing(op, case, name, str(missing))
        if not calls:
            return
        first = next(iter(calls))
        off: dict[str, dict[str, float]] = {}
        if same_results:
            outs = {name: call().float() for name, call in calls.items()}
            off = {name: {"off": float((out - outs[first]).abs().max())} for name, out in outs.items()}
        timed = self._in_turn([*calls.values(), calls[first]])
        times = dict(zip([*calls, "again"], timed, strict=True))
        for name in calls:
            share = {} if num_bytes is None else {"share_of_copy": self.share_of_copy(num_bytes[name], times[name])}
            again = {"again": times["again"] / times[first]} if name == first else {}
            figures = {"over_first": times[name] / times[first], **off.get(name, {}), **share, **again}
            self.row(op, case, name, times[name], **figures)

    def _in_turn(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        if self.toy:
            return [self.milliseconds(call) for call in calls]
        return graphs_in_turn(calls)

    def as_json(self) -> dict[str, Any]:
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"interpreter on {platform.machine()}",
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
            "toy": self.toy,
            # JSON has no NaN.
            "rows": [{name: None if value != value else value for name, value in row.items()} for row in self.rows],
        }

    def table(self) -> str:
        return table_of(self.rows)


def failed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parts that failed."""
    return [f"{row['op']} {row['case']}".strip() for row in rows if "failed" in row]


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row but the checks that passed."""
    return "\n".join(_line(row) for row in rows if "checked" not in row)


# Twice the L2 of an H200: writing as much replaces whatever is in it.
_FLUSHED_BYTES = 128 << 20
# Time of the calls in one graph, and how often it is replayed.
_GRAPH_MILLISECONDS, _MOST_CALLS, _REPLAYS = 4.0, 20, 7


def graphs_in_turn(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The median time of each call by replays of graphs in turn, each call behind a write that flushes L2, less the
    median of the writes alone."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        counts: list[int] = []
        for call in calls:
            call()  # Compiles.
            once = _event_milliseconds(call)
            counts.append(max(1, min(_MOST_CALLS, int(_GRAPH_MILLISECONDS / max(once, 1e-3)))))

        def flush_and(call: Callable[[], object]) -> None:
            flushed.zero_()
            call()

        graphs = [_captured(partial(flush_and, call), count) for call, count in zip(calls, counts, strict=True)]
        writes = _captured(flushed.zero_, _MOST_CALLS)
        rounds = [[_event_milliseconds(graph.replay) for graph in (*graphs, writes)] for _ in range(_REPLAYS)]
    torch.cuda.current_stream().wait_stream(stream)
    *medians, writing = (sorted(times)[_REPLAYS // 2] for times in zip(*rounds, strict=True))
    return [median / count - writing / _MOST_CALLS for median, count in zip(medians, counts, strict=True)]


def _captured(body: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            body()
    return graph


def _event_milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _line(row: Mapping[str, Any]) -> str:
    start = f"{row['op']:<18}{row['case']:<44}"
    for name in ("skipped", "failed", "missing", "found"):
        if name in row:
            return f"{start}{row.get('way', '')}{' ' * ('way' in row)}{name}: {row[name]}"
    named = ("op", "case", "way", "ms")
    # None: NaN that went through JSON.
    figures = "  ".join(f"{name} {value:.3g}" for name, value in row.items() if name not in named and value is not None)
    milliseconds = float("nan") if row["ms"] is None else row["ms"]
    return f"{start}{row['way']:<16}{milliseconds:>10.4f} ms  {figures}"
