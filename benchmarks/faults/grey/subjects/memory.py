"""Memory that is short: a worker that its limit kills, and one whose allocations fail."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.faults.cluster import Kind
from benchmarks.faults.grey.fault import Blow, Fault
from benchmarks.faults.grey.ground import Ground

_ROOT = Path("/sys/fs/cgroup")
# The worker's next new page is beyond it.
_LIMIT_BYTES = 4096
# Room for small allocations only.
_HEADROOM_BYTES = 1 << 20
_PATIENCE_S = 20.0


@contextlib.contextmanager
def _limited_group() -> Iterator[Path]:
    """A control group with almost no memory, v1 or v2. Raises OSError where this process may not make one."""
    is_v1 = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if is_v1 else _ROOT) / f"octavo-grey-{os.getpid()}"
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


FAULTS = [
    Fault(
        name="memory-killed",
        what="a worker is killed by the memory limit of its control group",
        inject=_kill_by_limit,
        brief=None,
        missing=_why_no_group,
    ),
    Fault(name="memory-refused", what="a worker's allocations fail (RLIMIT_AS)", inject=_refuse, seconds=(2.0, 10.0)),
]
