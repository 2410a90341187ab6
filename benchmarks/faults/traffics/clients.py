"""Good and bad requests of clients at random: afterwards nothing may be left over.

Most clients finish their streams, others cancel them, run out of time, read slowly, vanish, or send what is invalid,
too large, or no message at all. Every request must end in one of the ways that its manner allows. Faults come now and
then, but no kill takes the first router, the first scheduler and the first worker.

At the end, when nothing runs any more, each process is compared with the one that had its place before the load: live
streams, sequences, KV blocks in use, host blocks and workers' rows must be 0, and there must be as many event-loop
tasks and file descriptors as before. Growth of memory is only reported. With images the memory of items is watched.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil

from benchmarks.faults.cluster import Cluster, Kind, Place, Samples
from benchmarks.faults.driver import Hit, Injection, Say, Traffic
from benchmarks.faults.ground import FLAGS, Ground
from benchmarks.faults.traffics import images
from benchmarks.faults.traffics.manners import (
    BAD,
    GOOD,
    ITEM_MEMORY,
    MAX_MESSAGE_BYTES,
    WITH_IMAGES,
    Edge,
    Manner,
    Surprise,
)
from octavo import AsyncClient, SamplingParams
from octavo.client.errors import OctavoError, Overloaded

# Small limits for messages and for slow readers' buffers: requests reach both sooner.
CLIENT_FLAGS = (*FLAGS, f"--max-message-bytes={MAX_MESSAGE_BYTES}", "--stream-buffer-bytes=16384")
IMAGE_CLIENT_FLAGS = (*images.FLAGS, f"--item-memory={ITEM_MEMORY}")
_SURVIVORS = frozenset((Place(Kind.ROUTER, 0), Place(Kind.SCHEDULER, 0), Place(Kind.WORKER, 0, 0)))
# Mean seconds between two requests of one client, and between a fault's end and the next fault.
_PAUSE_S, _FAULT_PAUSE_S = 0.3, 12.0
# Faults stop after this share of the time, so that restarted processes run long enough to show leaks.
_SHARE_WITH_FAULTS = 0.7
# Within this time gRPC has closed what it closes by itself.
_PATIENCE_S = 60.0

# Metrics that are 0 when nothing runs, by kind of process.
_IDLE_AT_ZERO: dict[Kind, tuple[str, ...]] = {
    Kind.ROUTER: ("octavo_streams", "octavo_router_held_streams", "octavo_item_bytes"),
    Kind.SCHEDULER: (
        "octavo_num_requests_running",
        "octavo_num_requests_waiting",
        "octavo_kv_cache_usage_ratio",
        "octavo_swap_space_usage_ratio",
        "octavo_needed_item_bytes",
    ),
    Kind.WORKER: ("octavo_worker_item_input_bytes",),
}
# Allows for one more pool thread, or a connection that gRPC keeps for a while: a leak repeats and gets larger.
_FEW_DESCRIPTORS, _FEW_TASKS = 6, 4
# Workers learn of freed rows with the next plan: until then they hold the rows of the last step's sequences.
_FEW_ROWS = 4
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The resources of one process. started: psutil's create_time; num_tasks: 0 for a process that reports no event
    loop; num_rows: a worker's; rss_mib: its own and shared memory; held: metrics that should be 0 and are not."""

    started: float
    num_descriptors: int
    num_tasks: int
    num_rows: int
    rss_mib: float
    held: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Levels at one place, at the cluster's first rest and at its last. is_same: the process was never restarted."""

    name: str
    is_same: bool
    before: Level
    after: Level

    @property
    def leaks(self) -> list[str]:
        """A sentence for each leak; empty if there are none."""
        found = [f"{self.name}: {metric} is {value:g}" for metric, value in self.after.held.items()]
        for what, few in (("num_descriptors", _FEW_DESCRIPTORS), ("num_tasks", _FEW_TASKS)):
            was, is_now = getattr(self.before, what), getattr(self.after, what)
            if is_now > was + few:
                found.append(f"{self.name}: {what} is {is_now}, and was {was}")
        if self.after.num_rows > _FEW_ROWS:
            found.append(f"{self.name}: {self.after.num_rows} rows are held, at most {_FEW_ROWS} may be")
        return found

    @property
    def row(self) -> str:
        before, after = self.before, self.after
        counts = f"{before.num_descriptors:5} -> {after.num_descriptors:3} {before.num_tasks:5} -> {after.num_tasks:3}"
        memory = f"{before.rss_mib:7.0f} -> {after.rss_mib:4.0f}"
        return f"{self.name:14} {counts} {after.num_rows:6} {memory}  {'*' * self.is_same}"

    def as_json(self) -> dict[str, object]:
        return {"process": self.name, "same": self.is_same, "before": asdict(self.before), "after": asdict(self.after)}


async def read_levels(cluster: Cluster) -> dict[str, Level]:
    """Reads the levels of all processes that answer, and of `octavo up` itself, by name."""
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
    """Waits until nothing leaks or `patience_s` have passed. Returns the growth since `before`."""
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


# Gauges of each kind of process: those that item_memory bounds, and those that are only reported.
_BOUNDED = {
    Kind.ROUTER: {"octavo_item_bytes": True},
    Kind.SCHEDULER: {"octavo_stored_item_bytes": True, "octavo_needed_item_bytes": True},
    Kind.WORKER: {"octavo_worker_item_input_bytes": False},
}


class Clients(Traffic):
    def __init__(
        self, ground: Ground, say: Say, *, seconds: float, num_clients: int, seed: int, has_images: bool = False
    ) -> None:
        super().__init__(ground, say)
        self._edge = Edge(targets=self.cluster.targets, http_ports=ground.http_ports, has_images=has_images)
        self._manners: Mapping[Manner, int] = WITH_IMAGES if has_images else GOOD | BAD
        self._seconds, self._num_clients, self._seed = seconds, num_clients, seed
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ends = Counter[str]()
        # The most MiB of items that any process of a kind had when it was asked.
        self._peaks: dict[str, float] = {}
        ground.spared = _SURVIVORS

    async def begin(self) -> None:
        # Processes create some things at the first request of a kind: that comes before the first look.
        for manner in self._manners:
            await self._request(manner, random.Random(f"{self._seed}/{manner.__name__}"))
        self._before = await _levels_at_rest(self.cluster)
        shown = ", ".join(f"{name} has {level.num_descriptors}" for name, level in self._before.items())
        self.say(f"at rest: {shown} descriptors")
        self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._come(index)) for index in range(self._num_clients)]
        if self._edge.has_images:
            self._tasks.append(asyncio.create_task(self._watch_items()))

    async def is_ready(self, injection: Injection, choose: random.Random) -> bool:
        pause = choose.expovariate(1 / _FAULT_PAUSE_S)
        if time.monotonic() + pause > self._began + _SHARE_WITH_FAULTS * self._seconds:
            return False
        await asyncio.sleep(pause)
        return True

    async def end(self, hits: Sequence[Hit]) -> None:
        await asyncio.sleep(max(0.0, self._began + self._seconds - time.monotonic()))
        self._stop.set()
        await asyncio.gather(*self._tasks)
        loaded_s, ended = time.monotonic() - self._began, time.monotonic()
        self.say(f"{self._ends.total()} requests in {loaded_s:.0f} s")
        await _compute_little(self.cluster)
        growths = await rest(self.cluster, self._before, patience_s=_PATIENCE_S)
        rest_s = time.monotonic() - ended
        leaks = [leak for growth in growths for leak in growth.leaks]
        self.problems += [f"left over: {leak}" for leak in leaks]
        self.figures = {
            "seconds": round(loaded_s, 1),
            "rest_s": round(rest_s, 1),
            "ends": self._ends,
            "peaks_mib": self._peaks,
            "processes": [growth.as_json() for growth in growths],
        }
        self.tables = ["how requests ended", *(f"  {count:6}  {end}" for end, count in sorted(self._ends.items()))]
        self.tables += ["", "process         descriptors     tasks   rows          MiB  (*: never restarted)"]
        self.tables += [growth.row for growth in growths]
        self.tables += [f"at most {mib:.2f} MiB  {what}" for what, mib in self._peaks.items()]
        self.tables.append(f"at rest {rest_s:.1f} s after the last request; {len(leaks)} things are left over")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ground.spared = frozenset()

    async def _come(self, index: int) -> None:
        """Sends one request after the other until the end."""
        choose = random.Random(f"{self._seed}/{index}")
        manners, weights = list(self._manners), list(self._manners.values())
        while not self._stop.is_set():
            await asyncio.sleep(choose.expovariate(1 / _PAUSE_S))
            await self._request(choose.choices(manners, weights)[0], choose)

    async def _request(self, manner: Manner, choose: random.Random) -> None:
        name = manner.__name__
        try:
            self._ends[f"{name}: {await manner(self._edge, choose)}"] += 1
        except (OctavoError, Surprise, TimeoutError) as error:
            if self._edge.has_images and isinstance(error, Overloaded):
                self._ends[f"{name}: no room"] += 1
            else:
                self.problems.append(f"{name}: {error!r}")

    async def _watch_items(self) -> None:
        """Asks all processes in turn for the bytes of items that they have."""
        most = int(self.cluster.options.item_memory * 2**30)
        while not self._stop.is_set():
            for place in self.cluster.places():
                if (samples := await self.cluster.samples(place)) is None:
                    continue
                for metric, is_bounded in _BOUNDED[place.kind].items():
                    num_bytes, name = samples.value(metric), f"{place.kind}: {metric}"
                    self._peaks[name] = max(self._peaks.get(name, 0.0), round(num_bytes / 2**20, 2))
                    if is_bounded and num_bytes > most:
                        self.problems.append(f"{place}: {metric} is {num_bytes:.0f}, above item_memory={most}")
            await asyncio.sleep(_POLL_S)


async def _compute_little(cluster: Cluster) -> None:
    """Computes a token or two at each replica: these plans free the rows of sequences that ended before."""
    async with AsyncClient(cluster.targets[0], retry_for=_PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
        for _ in range(2 * cluster.options.data_parallel_size):
            tasks.create_task(client.generate([5], SamplingParams(max_tokens=2)))


async def _levels_at_rest(cluster: Cluster) -> dict[str, Level]:
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        levels = await read_levels(cluster)
        if not any(level.held for level in levels.values()):
            return levels
        if time.monotonic() > give_up:
            raise TimeoutError(f"the cluster is not idle before the load: {levels}")
        await asyncio.sleep(_POLL_S)
