"""Disks that are full, descriptors and memory that are used up, and the wall clock of the whole cluster, set back and
forth."""

import asyncio
import contextlib
import functools
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.faults.cluster import Kind
from benchmarks.faults.driver import SUPERVISOR, Blow, Fault
from benchmarks.faults.ground import Ground
from benchmarks.faults.means.disk_and_clock import why_no_clock

_GROUPS = Path("/sys/fs/cgroup")
# The worker's next new page is beyond it.
_LIMIT_BYTES = 4096
# Room for small allocations only.
_HEADROOM_BYTES = 1 << 20
_PATIENCE_S = 20.0
_JUMPS_S = (90, 3600, 86_400)


async def _fill_disk(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Fills the disk with traces, the log of `octavo up`, and the runtime directory."""
    ground.means.disk.fill(ground.writers())
    await asyncio.sleep(seconds)
    ground.means.disk.free(ground.writers())
    return Blow(victims=["all processes"], note=ground.means.disk.means)


async def _fill_disk_and_kill(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a worker, without its packed weights, while the disk is full: the next one starts there."""
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    if ground.means.has_weights:
        for path in (ground.means.disk.path / "cache" / "weights").glob("*"):
            if path.is_file():
                path.unlink()
    ground.means.disk.fill(ground.writers())
    ground.cluster.kill([place])
    await asyncio.sleep(seconds)
    ground.means.disk.free(ground.writers())
    return Blow(victims=[str(place)], may_restart={str(place)}, note=ground.means.disk.means)


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


@contextlib.contextmanager
def _limited_group() -> Iterator[Path]:
    """A control group with almost no memory, v1 or v2. Raises OSError where this process may not make one."""
    is_v1 = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if is_v1 else _GROUPS) / f"octavo-grey-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(_LIMIT_BYTES))
        yield group
    finally:
        # The kernel lets go of a process that has ended a little later.
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def _why_no_group() -> str:
    try:
        with _limited_group():
            return ""
    except OSError as error:
        return f"no control group of memory: {error.strerror}"


async def _kill_by_limit(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    victim = ground.process(place)
    with _limited_group() as group:
        (group / "cgroup.procs").write_text(str(victim.pid))
        _, alive = await asyncio.to_thread(psutil.wait_procs, [victim], timeout=_PATIENCE_S)
        assert not alive, f"{place} lives within its limit of {_LIMIT_BYTES} bytes"
    return Blow(victims=[str(place)], may_restart={str(place)}, note="killed by its control group")


async def _refuse(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Bounds a worker's address space at what it has: larger allocations fail."""
    place = choose.choice(ground.cluster.places(Kind.WORKER))
    victim = ground.process(place)
    before = victim.rlimit(psutil.RLIMIT_AS)
    victim.rlimit(psutil.RLIMIT_AS, (victim.memory_info().vms + _HEADROOM_BYTES, before[1]))
    await asyncio.sleep(seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.rlimit(psutil.RLIMIT_AS, before)
    return Blow(victims=[str(place)], may_restart={str(place)})


async def _jump(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Sets the clock once to one side, once to the other, then right again."""
    jump = choose.choice(_JUMPS_S) * choose.choice((-1, 1))
    for offset in (jump, -jump):
        ground.means.clock.set_to(offset)
        await asyncio.sleep(seconds / 2)
    ground.means.clock.set_to(0)
    return Blow(victims=["all processes"], note=f"by {jump:+} s, then {-jump:+} s")


async def _jump_back_and_kill(ground: Ground, choose: random.Random, seconds: float) -> Blow:
    """Kills a scheduler while the clock is back: what its successor begins is older than what workers have seen."""
    jump = -choose.choice(_JUMPS_S)
    ground.means.clock.set_to(jump)
    place = choose.choice(ground.cluster.places(Kind.SCHEDULER))
    ground.cluster.kill([place])
    await ground.wait_until_serving(f"a kill of {place} at {jump:+} s")
    ground.means.clock.set_to(0)
    return Blow(victims=[str(place)], may_restart={str(place)}, note=f"by {jump:+} s")


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
    Fault(
        name="memory-killed",
        what="a worker is killed by the memory limit of its control group",
        inject=_kill_by_limit,
        brief=None,
        missing=_why_no_group,
    ),
    Fault(name="memory-refused", what="a worker's allocations fail (RLIMIT_AS)", inject=_refuse, seconds=(2.0, 10.0)),
    Fault(name="clock", what="the wall clock is set back and forth", inject=_jump, missing=why_no_clock),
    Fault(
        name="clock-back-kill",
        what="the wall clock is set back, and a scheduler is killed",
        inject=_jump_back_and_kill,
        brief=None,
        missing=why_no_clock,
    ),
]
