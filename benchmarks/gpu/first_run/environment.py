"""The machine and its ceilings: copies and reads by kernels, and a bf16 product of random numbers."""

import importlib.metadata
import shutil
import subprocess

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.yardsticks import random_numbers

_PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "transformers", "pyzmq", "pydantic", "msgspec")
_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
OP = "environment"


def run(report: Report, *, toy: bool) -> None:
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        report.note(OP, package, version)
    # Not a shell's `which`: a machine without the driver's tools is still worth measuring.
    for tool in ("nvidia-smi", "ncu", "compute-sanitizer", "nvcc"):
        report.note(OP, tool, shutil.which(tool) or "missing")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        report.note(OP, "nvidia-smi", done.stdout.strip() or done.stderr.strip())
    report.copy_bandwidth()
    report.read_bandwidth()
    _torch_copies(report, toy)
    _product(report, toy)


def _torch_copies(report: Report, toy: bool) -> None:
    """torch's own copy by events and by graphs, whose memcpy node was slower on an H200."""
    source = random_numbers(1 << 12 if toy else 2 << 30, report.device)
    target = torch.empty_like(source)
    for way, by_graph in (("events", False), ("graph", True)):
        milliseconds = report.milliseconds(lambda: target.copy_(source), by_graph=by_graph)
        report.row("yardstick", "torch copy_", way, milliseconds, tb_per_s=2 * source.nbytes / milliseconds / 1e9)


def _product(report: Report, toy: bool) -> None:
    size = 64 if toy else 8192
    a, b = (torch.randn(size, size, device=report.device, dtype=torch.bfloat16) for _ in range(2))
    milliseconds = report.milliseconds(lambda: a @ b, by_graph=False)
    report.row("yardstick", f"bf16 product of {size}", "events", milliseconds, tflops=2 * size**3 / milliseconds / 1e9)
