"""NCCL with one rank on one GPU: connect, capture a sum, replay it, drop the graph, abort; and the time of each.

The calls are those of worker.parallel.nccl in a worker. NCCL's own kernels may not run for one rank, whose sum is its
input; what this shows is that groups and graphs begin and end in the order in which a worker does that. Toy mode uses
gloo, which gathers but does not sum for one rank, and the interpreter's device.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.gpu.report import Report
from worker.device.device import CudaDevice, InterpretedDevice

OP = "one_rank"
_NUMBERS = 64 * 4096


def run(report: Report, *, toy: bool) -> None:
    device = InterpretedDevice(memory_bytes=1 << 30) if toy else CudaDevice()
    for epoch in (1, 2):
        # A second epoch, since a worker joins again after another rank has died.
        _epoch(report, device, epoch, toy)


def _epoch(report: Report, device: Any, epoch: int, toy: bool) -> None:
    def timed(what: str):
        return _timed(report, f"epoch {epoch}, {what}", device)

    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    with timed("connect"):
        group = _group(store, device, toy)
    x = torch.arange(_NUMBERS, device=device.torch_device).remainder(97).bfloat16()
    expected = x.clone()

    def sums() -> torch.Tensor:
        for _ in range(0 if toy else 8):
            group.sum_(x)
        return group.gather(x)

    with timed("first sums"):
        gathered = sums()
    report.check(OP, f"epoch {epoch}, sums", x, expected, rtol=0, atol=0)
    report.check(OP, f"epoch {epoch}, gather", gathered[0], expected, rtol=0, atol=0)
    with timed("capture"):
        graph = device.capture(sums, None)
    for replay in range(2):
        with timed(f"replay {replay + 1}"):
            graph.replay()
    report.check(OP, f"epoch {epoch}, replays", x, expected, rtol=0, atol=0)
    # In a worker's order: the graphs first, because leaving waits for them.
    with timed("drop the graph"):
        del graph
    with timed("leave"):
        group.leave()


@contextmanager
def _timed(report: Report, case: str, device: Any) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    device.synchronize()
    milliseconds = float("nan") if report.toy else (time.perf_counter() - begin) * 1e3
    report.row(OP, case, "host", milliseconds)


def _group(store: TCPStore, device: Any, toy: bool) -> Any:
    options: dict[str, Any] = {"host": "127.0.0.1", "connect_timeout": 30.0, "call_timeout": 30.0}
    make: Callable[..., Any]
    if toy:
        from worker.parallel.gloo import GlooGroup as make
    else:
        from worker.parallel.nccl import NcclGroup as make

        options |= {"device": device.torch_device, "batch_invariant": False}
    return make("the only rank", store, 0, 1, **options)
