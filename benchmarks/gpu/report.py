"""The report of a GPU benchmark: checks, times, a table for people and JSON for programs."""

import datetime
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton


@dataclass
class Report:
    """Collects the rows of one run. In toy mode, for the interpreter, everything is checked and nothing timed."""

    toy: bool
    # "cuda", or "cpu" under the interpreter.
    device: str
    # time.monotonic() at which to stop.
    deadline: float
    # Called after each part, so that a killed run leaves its figures so far.
    save: Callable[["Report"], None] = lambda report: None
    rows: list[dict[str, Any]] = field(default_factory=list)
    _copy_bandwidth: float | None = None

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
        return [f"{row['op']} {row['case']}".strip() for row in self.rows if "failed" in row]

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
            return _graph_milliseconds(call)
        return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))  # pyright: ignore[reportArgumentType]

    def row(self, op: str, case: str, way: str, milliseconds: float, **figures: float) -> None:
        """Adds the time of one way to compute one case. figures: the time in other units: tflops, share_of_copy."""
        self.rows.append({"op": op, "case": case, "way": way, "ms": milliseconds, **figures})

    def skip(self, op: str, case: str, reason: str) -> None:
        self.rows.append({"op": op, "case": case, "skipped": reason})

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a copy of 2 GiB; NaN in toy mode."""
        if self._copy_bandwidth is None:
            size = 1 << 10 if self.toy else 2 << 30
            source = torch.zeros(size, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            self._copy_bandwidth = 2 * size / (self.milliseconds(lambda: target.copy_(source)) / 1e3)
        return self._copy_bandwidth

    def share_of_copy(self, num_bytes: int, milliseconds: float) -> float:
        """The bandwidth of reading or writing num_bytes, over that of a copy."""
        return num_bytes / (milliseconds / 1e3) / self.copy_bandwidth()

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
        return "\n".join(_line(row) for row in self.rows if "checked" not in row)


# Twice the L2 of an H200: writing as much replaces whatever is in it.
_FLUSHED_BYTES = 128 << 20
# Time of the calls in one graph, and how often it is replayed.
_GRAPH_MILLISECONDS, _MOST_CALLS, _REPLAYS = 4.0, 20, 7


def _graph_milliseconds(call: Callable[[], object]) -> float:
    """The median of replays of a graph of calls, each behind a write that flushes L2, less that of the writes alone."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # Compiles.
        once = _event_milliseconds(call)
        count = max(1, min(_MOST_CALLS, int(_GRAPH_MILLISECONDS / max(once, 1e-3))))

        def flush_and_call() -> None:
            flushed.zero_()
            call()

        both, writes = (_captured(body, count) for body in (flush_and_call, flushed.zero_))
        times = sorted(_event_milliseconds(both.replay) - _event_milliseconds(writes.replay) for _ in range(_REPLAYS))
    torch.cuda.current_stream().wait_stream(stream)
    return times[_REPLAYS // 2] / count


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


def _line(row: dict[str, Any]) -> str:
    start = f"{row['op']:<18}{row['case']:<44}"
    for name in ("skipped", "failed"):
        if name in row:
            return f"{start}{name}: {row[name]}"
    named = ("op", "case", "way", "ms")
    figures = "  ".join(f"{name} {value:.3g}" for name, value in row.items() if name not in named)
    return f"{start}{row['way']:<16}{row['ms']:>10.4f} ms  {figures}"
