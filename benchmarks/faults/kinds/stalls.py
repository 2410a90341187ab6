"""Processes that are stopped (SIGSTOP) and go on later (SIGCONT), as by a debugger, a frozen container, Ctrl-Z; and
slow ones, whose heartbeats come in time."""

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

from benchmarks.faults.client_process import ClientProcess
from benchmarks.faults.cluster import Kind
from benchmarks.faults.driver import SUPERVISOR, Blow, Fault
from benchmarks.faults.ground import Ground

# The supervisor may see a stop begin this much sooner: it looks now and then.
_MARGIN_S = 1.0
_NUM_CLIENT_STREAMS = 4
_SLICE_S = 0.1
_SHORTEST_RUN_S = 0.01
_NUM_LOOPS = 4
_LOOP = "while True: pass"


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Stops a process. It may have been killed meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


async def _stop_one(kind: Kind, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    place = choose.choice(ground.cluster.places(kind))
    with stopped(ground.process(place)):
        await asyncio.sleep(seconds)
    is_long = seconds > ground.cluster.options.hang_timeout - _MARGIN_S
    return Blow(victims=[str(place)], may_restart={str(place)} if is_long else set())


async def _stop_supervisor(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    with stopped(ground.supervisor):
        await asyncio.sleep(seconds)
    return Blow(victims=[SUPERVISOR])


async def _stop_client(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    seed = choose.randrange(2**31)
    async with ClientProcess(ground.cluster.targets, seed, _NUM_CLIENT_STREAMS) as client:
        await client.wait_until_begun()
        with stopped(client.process):
            await asyncio.sleep(seconds)
        return Blow(victims=["a client"], verdicts=await client.verdicts())


async def _stop_all(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Stops the whole cluster, as a laptop does whose lid is closed."""
    places = ground.cluster.processes()
    with contextlib.ExitStack() as held:
        for process in (ground.supervisor, *places.values()):
            held.enter_context(stopped(process))
        await asyncio.sleep(seconds)
    return Blow(victims=["all processes"])


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
    return Blow(victims=[str(place)], note=f"runs {run_s / (run_s + _SLICE_S):.0%} of the time")


FAULTS = [
    *(
        Fault(
            name=f"stop-{kind}",
            what=f"a {kind} is stopped",
            inject=functools.partial(_stop_one, kind),
            seconds=(2.0, 60.0),
            brief=0.8,
        )
        for kind in (Kind.ROUTER, Kind.SCHEDULER, Kind.WORKER)
    ),
    Fault(name="stop-supervisor", what="`octavo up` is stopped", inject=_stop_supervisor, seconds=(2.0, 60.0)),
    Fault(name="stop-client", what="a client is stopped", inject=_stop_client, seconds=(2.0, 60.0), brief=0.8),
    Fault(name="stop-all", what="all processes are stopped at once", inject=_stop_all, seconds=(2.0, 60.0)),
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
