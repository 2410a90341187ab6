"""Disks that are full and descriptors that are used up."""

import asyncio
import contextlib
import functools
import itertools
import random
from pathlib import Path

import psutil

from benchmarks.faults.cluster import Kind
from benchmarks.faults.grey.fault import SUPERVISOR, Blow, Fault
from benchmarks.faults.grey.ground import Ground


async def _fill_disk(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Fills the disk with traces, the log of `octavo up`, and the runtime directory."""
    ground.disk.fill(ground.writers())
    await asyncio.sleep(seconds)
    ground.disk.free(ground.writers())
    return Blow(victims=["all processes"], note=ground.disk.means)


async def _fill_disk_and_kill(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a worker, without its packed weights, while the disk is full: the next one starts there."""
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    if ground.has_weights:
        for path in (ground.disk.path / "cache" / "weights").glob("*"):
            if path.is_file():
                path.unlink()
    ground.disk.fill(ground.writers())
    ground.cluster.kill([place])
    await asyncio.sleep(seconds)
    ground.disk.free(ground.writers())
    return Blow(victims=[str(place)], may_restart={str(place)}, note=ground.disk.means)


async def _use_up_descriptors(kind: Kind | None, ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Lets a process open no file and no connection. kind: None for the supervisor."""
    place = choose.choice(ground.cluster.places(kind)) if kind else None
    victim = ground.process(place) if place else ground.supervisor
    before = victim.rlimit(psutil.RLIMIT_NOFILE)
    victim.rlimit(psutil.RLIMIT_NOFILE, (_lowest_free(victim.pid), before[1]))
    await asyncio.sleep(seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.rlimit(psutil.RLIMIT_NOFILE, before)
    return Blow(victims=[str(place) if place else SUPERVISOR])


async def _use_up_descriptors_and_kill(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a worker while `octavo up` has no descriptors to start another one with."""
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    victim = ground.process(place)
    blow = asyncio.create_task(_use_up_descriptors(None, ground, choose, seconds))
    await asyncio.sleep(0)
    victim.kill()
    return Blow(victims=[*(await blow).victims, str(place)], may_restart={str(place)})


def _lowest_free(pid: int) -> int:
    """The number that the process's next descriptor would get."""
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in used)


FAULTS = [
    Fault(
        name="disk-full",
        what="the disk of traces, log and runtime directory is full",
        inject=_fill_disk,
        seconds=(2.0, 20.0),
    ),
    Fault(
        name="disk-full-kill",
        what="that disk and the weight cache's are full, and a worker is killed",
        inject=_fill_disk_and_kill,
        seconds=(5.0, 20.0),
        brief=None,
        needs_weights=True,
    ),
    *(
        Fault(
            name=f"descriptors-{kind or 'supervisor'}",
            what=f"{f'a {kind}' if kind else '`octavo up`'} has no descriptors left",
            inject=functools.partial(_use_up_descriptors, kind),
            seconds=(2.0, 20.0),
        )
        for kind in (Kind.ROUTER, Kind.SCHEDULER, Kind.WORKER, None)
    ),
    Fault(
        name="descriptors-supervisor-kill",
        what="`octavo up` has no descriptors left, and a worker is killed",
        inject=_use_up_descriptors_and_kill,
        seconds=(5.0, 20.0),
        brief=None,
    ),
]
