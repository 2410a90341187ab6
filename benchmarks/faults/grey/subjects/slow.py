"""Processes that work, but slowly: their heartbeats come in time."""

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.faults.cluster import Kind
from benchmarks.faults.grey.fault import Blow, Fault
from benchmarks.faults.grey.ground import Ground

_SLICE_S = 0.1
_SHORTEST_RUN_S = 0.01
_NUM_LOOPS = 4
_LOOP = "while True: pass"


async def _busy_core(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Puts a worker on a core with busy loops, which take most of its time."""
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    core = choose.choice(sorted(os.sched_getaffinity(0)))
    with _on_core(ground.process(place), core), _busy_loops(core):
        await asyncio.sleep(seconds)
    return Blow(victims=[str(place)])


@contextlib.contextmanager
def _busy_loops(core: int) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for _ in range(_NUM_LOOPS):
            loop = held.enter_context(subprocess.Popen([sys.executable, "-I", "-S", "-c", _LOOP]))
            held.callback(loop.kill)
            os.sched_setaffinity(loop.pid, {core})
        yield


@contextlib.contextmanager
def _on_core(process: psutil.Process, core: int) -> Iterator[None]:
    """Binds all threads of a process to a core."""
    threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    try:
        for thread in before:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, {core})
        yield
    finally:
        for thread, cores in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


async def _slices(kind: Kind, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Stops a process for 100 ms again and again; between, it runs for 10 to 100 ms."""
    place = choose.choice(ground.cluster.places(kind))
    process = ground.process(place)
    run_s = choose.uniform(_SHORTEST_RUN_S, _SLICE_S)
    ends = time.monotonic() + seconds
    try:
        while time.monotonic() < ends:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(_SLICE_S)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(run_s)
    finally:
        process.send_signal(signal.SIGCONT)
    return Blow(victims=[str(place)], note=f"runs {_percent(run_s)} of the time")


def _percent(run_s: float) -> str:
    return f"{run_s / (run_s + _SLICE_S):.0%}"


FAULTS = [
    Fault(name="slow-worker-cpu", what="busy loops take a worker's core", inject=_busy_core, seconds=(2.0, 20.0)),
    *(
        Fault(
            name=f"slow-{kind}",
            what=f"a {kind} is stopped in slices of 100 ms",
            inject=functools.partial(_slices, kind),
            seconds=(2.0, 20.0),
        )
        for kind in (Kind.WORKER, Kind.SCHEDULER, Kind.ROUTER)
    ),
]
