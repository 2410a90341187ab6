"""Common code for memory-bound ops, which are compared with a copy's bandwidth."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.report import Report

# Time for one measured call, including its compilation.
_SECONDS = 3.0


def token_counts(toy: bool) -> Sequence[int]:
    """Tokens of a decode step of few rows, one of many rows, and a large prefill."""
    return (3,) if toy else (16, 256, 16384)


def measure(report: Report, op: str, case: str, way: str, num_bytes: int, call: Callable[[], object]) -> None:
    """Times a call. num_bytes: the least bytes that it must read and write."""
    if not report.has_time(_SECONDS):
        report.skip(op, f"{case} {way}", "no time left")
        return
    milliseconds = report.milliseconds(call)
    report.row(op, case, way, milliseconds, share_of_copy=report.share_of_copy(num_bytes, milliseconds))


def num_bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
