"""What each process of a cluster holds when nothing runs: the level to which it has to come back."""

import asyncio
import contextlib
import time
from dataclasses import asdict, dataclass

import psutil

from benchmarks.faults.cluster import Cluster, Kind, Samples

# Metrics that are 0 when nothing runs, by kind of process.
_IDLE_AT_ZERO: dict[Kind, tuple[str, ...]] = {
    Kind.ROUTER: ("octavo_streams", "octavo_router_held_streams"),
    Kind.SCHEDULER: (
        "octavo_num_requests_running",
        "octavo_num_requests_waiting",
        "octavo_kv_cache_usage_ratio",
        "octavo_swap_space_usage_ratio",
    ),
    Kind.WORKER: (),
}
# A thread more of a pool, or a connection that gRPC keeps for a while: what leaks does so again and again.
_FEW_DESCRIPTORS, _FEW_TASKS = 6, 4
# Workers hear of rows that are free with the next plan: those of the last step's sequences are held meanwhile.
_FEW_ROWS = 4
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Of one process. started: when, in seconds of psutil; num_tasks: 0 for what has no event loop that tells;
    num_rows: of a worker; rss_mib: memory that is its own or shared. held: metrics that should be 0 and are not."""

    started: float
    num_descriptors: int
    num_tasks: int
    num_rows: int
    rss_mib: float
    held: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of one place, from the cluster's first rest to its last. is_same: one process lived through it all."""

    name: str
    is_same: bool
    before: Level
    after: Level

    @property
    def leaks(self) -> list[str]:
        """For people; empty if there are none."""
        found = [f"{self.name}: {metric} is {value:g}" for metric, value in self.after.held.items()]
        for what, few in (("num_descriptors", _FEW_DESCRIPTORS), ("num_tasks", _FEW_TASKS)):
            was, is_now = getattr(self.before, what), getattr(self.after, what)
            if is_now > was + few:
                found.append(f"{self.name}: {what} is {is_now}, and was {was}")
        if self.after.num_rows > _FEW_ROWS:
            found.append(f"{self.name}: {self.after.num_rows} rows are held, {_FEW_ROWS} could be")
        return found

    def as_json(self) -> dict[str, object]:
        return {"process": self.name, "same": self.is_same, "before": asdict(self.before), "after": asdict(self.after)}


async def read_levels(cluster: Cluster) -> dict[str, Level]:
    """By name, of all processes that answer, and of `octavo up` itself."""
    levels = {}
    for place, process in sorted(cluster.processes().items()):
        samples = await cluster.samples(place)
        if samples is None:
            continue
        held = {name: value for name in _IDLE_AT_ZERO[place.kind] if (value := samples.value(name))}
        with contextlib.suppress(psutil.NoSuchProcess):
            levels[str(place)] = _level(process, samples, held)
    levels["octavo up"] = _level(psutil.Process(cluster.up.process.pid), Samples(), {})
    return levels


async def rest(cluster: Cluster, before: dict[str, Level], *, patience_s: float) -> list[Growth]:
    """What has grown since, once nothing of it is a leak or `patience_s` have passed."""
    give_up = time.monotonic() + patience_s
    while True:
        after = await read_levels(cluster)
        growths = [
            Growth(name=name, is_same=after[name].started == level.started, before=level, after=after[name])
            for name, level in before.items()
            if name in after
        ]
        is_whole = after.keys() == before.keys()
        if (is_whole and not any(growth.leaks for growth in growths)) or time.monotonic() > give_up:
            assert is_whole, f"processes that do not answer: {sorted(before.keys() - after.keys())}"
            return growths
        await asyncio.sleep(_POLL_S)


def _level(process: psutil.Process, samples: Samples, held: dict[str, float]) -> Level:
    with process.oneshot():
        return Level(
            started=process.create_time(),
            num_descriptors=process.num_fds(),
            num_tasks=round(samples.value("octavo_asyncio_tasks")),
            num_rows=round(samples.value("octavo_worker_rows")),
            rss_mib=round(process.memory_info().rss / 2**20, 1),
            held=held,
        )
