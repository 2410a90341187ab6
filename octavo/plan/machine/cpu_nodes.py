"""The sockets and NUMA nodes of this machine, from /sys."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.groups.parallel import parse_core_lists

_SYS = Path("/sys/devices/system")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")
# The distance of a node to itself; others are in proportion to the time of a read (ACPI, System Locality Table).
LOCAL_DISTANCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuNodes:
    """cores: hardware threads by node. distances: by node and node; 10: the node itself. memory: bytes by node."""

    num_sockets: int
    num_cores: int
    cores: Sequence[Sequence[int]]
    distances: Sequence[Sequence[int]]
    memory: Sequence[int]

    @property
    def num_nodes(self) -> int:
        return len(self.cores)

    @property
    def longest_way(self) -> float:
        """Time to read the farthest node's memory, over that to read the own node's."""
        return max(max(row) for row in self.distances) / LOCAL_DISTANCE


def read_cpu_nodes(sys: Path = _SYS) -> CpuNodes:
    """Reads them. A machine that says nothing of nodes is one node."""
    topologies = [path / "topology" for path in sys.glob("cpu/cpu[0-9]*") if (path / "topology").exists()]
    threads = sorted(int(path.parent.name.removeprefix("cpu")) for path in topologies)
    sockets = {_read(path / "physical_package_id") for path in topologies}
    cores = {(_read(path / "physical_package_id"), _read(path / "core_id")) for path in topologies}
    numbers = sorted(int(path.name.removeprefix("node")) for path in sys.glob("node/node[0-9]*"))
    nodes, distances, memory = [], [], []
    for number in numbers:
        node = sys / f"node/node{number}"
        listed = _read(node / "cpulist")
        # A node of memory alone has no cores, and no worker.
        if listed:
            nodes.append(parse_core_lists(listed)[0])
            distances.append([int(each) for each in _read(node / "distance").split()])
            found = _TOTAL.search(_read(node / "meminfo"))
            memory.append(int(found[1]) * 2**10 if found else psutil.virtual_memory().total // len(numbers))
    if not nodes:
        nodes, distances, memory = [threads], [[LOCAL_DISTANCE]], [psutil.virtual_memory().total]
    return CpuNodes(
        num_sockets=len(sockets) or 1, num_cores=len(cores), cores=nodes, distances=distances, memory=memory
    )


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
