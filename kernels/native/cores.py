"""The cores that this process may compute on."""

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def usable_cores_by_node() -> list[int]:
    """The same cores, grouped by NUMA node."""
    nodes = {core: number for number, cores in enumerate(_nodes(_NODES)) for core in cores}
    return sorted(usable_cores(), key=lambda core: (nodes.get(core, -1), core))


def num_usable_cores() -> int:
    """The number of threads that can compute at once: the cores, or fewer if a control group limits CPU time (a
    container's --cpus). At least 1.

    A limit of 2.5 cores gives 3: two threads would leave half a core idle; three stall for a sixth of the time.
    """
    quota = cpu_quota(control_groups("cpu"))
    cores = len(usable_cores())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(directories: list[Path]) -> float | None:
    """The CPU time, in cores, that the control groups of these directories allow; None: unlimited."""
    quotas: list[float] = []
    for directory in directories:
        if (version2 := directory / "cpu.max").is_file():
            quota, period = version2.read_text().split()
        elif (version1 := directory / "cpu.cfs_quota_us").is_file():
            quota, period = version1.read_text().strip(), (directory / "cpu.cfs_period_us").read_text().strip()
        else:
            continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def control_groups(controller: str) -> list[Path]:
    """The directories of this process's control groups for "cpu", "memory" or "pids", and their ancestors: a limit on
    any of them applies."""
    if not _OWN_CGROUP.is_file():
        return []
    found: list[Path] = []
    for line in _OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        own = root / path.lstrip("/")
        found += [directory for directory in (own, *own.parents) if directory.is_relative_to(root)]
    return found


def _nodes(directory: Path) -> list[set[int]]:
    """The cores of each NUMA node, from /sys ("0-3,8-11"); empty if /sys has none."""
    found: list[set[int]] = []
    for file in sorted(directory.glob("node[0-9]*/cpulist")):
        cores: set[int] = set()
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        found.append(cores)
    return found
