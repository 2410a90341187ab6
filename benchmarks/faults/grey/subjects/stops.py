"""Processes that are stopped (SIGSTOP) and go on later (SIGCONT): as by a debugger, a frozen container, Ctrl-Z."""

import asyncio
import contextlib
import functools
import random
import signal
from collections.abc import Iterator

import psutil

from benchmarks.faults.cluster import Kind, Place
from benchmarks.faults.grey.clients import ClientProcess
from benchmarks.faults.grey.fault import SUPERVISOR, Blow, Fault
from benchmarks.faults.grey.ground import Ground

# The supervisor may see a stop begin this much sooner: it looks now and then.
_MARGIN_S = 1.0
_NUM_CLIENT_STREAMS = 4


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
    return await stop_place(ground, place, seconds)


async def stop_place(ground: Ground, place: Place, seconds: float) -> Blow:
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
]
