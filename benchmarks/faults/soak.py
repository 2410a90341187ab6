"""Runs good and bad requests at random while processes are killed: afterwards nothing may be left over.

    python -m benchmarks.faults.soak --minutes 10
    python -m benchmarks.faults.soak --minutes 1 --clients 8 --seed 7 --json
    python -m benchmarks.faults.soak --minutes 10 --grey
    python -m benchmarks.faults.soak --minutes 2 --images

`octavo up` with two replicas of two pipeline stages each and two routers, each with its HTTP server. Clients come at
random: most finish their streams, others cancel them, run out of time, read slowly, vanish, or send what is invalid,
too large, or no message at all. Now and then a process is killed with -9, but never the first router, the first
scheduler and the first worker. With --grey, two of three faults are grey failures instead, of all kinds and all
processes: stopped or slow ones, broken connections, full disks and others (see benchmarks.faults.chaos --grey). Every
request must end in one of the ways that its kind allows, and no process may be replaced without need. With --images
the requests have images, the model is a tiny Qwen2.5-VL, and the memory of items is watched.

At the end, when nothing runs any more, each process is compared with the one that had its place before the load: live
streams, sequences, KV blocks in use, host blocks and workers' rows must be 0, and there must be as many event-loop
tasks and file descriptors as before. Exits with 1 if anything is left over, or a request ended in a way that it must
not. Growth of memory is only reported.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import bad_input, traffic
from benchmarks.faults.bad_input import MAX_MESSAGE_BYTES
from benchmarks.faults.cluster import Cluster, Kind, Place, Samples
from benchmarks.faults.command import FLAGS, NUM_REPLICAS, NUM_ROUTERS, Plain, Say, add_arguments, plain, run_command
from benchmarks.faults.grey.ground import Ground, standing
from benchmarks.faults.grey.kinds import FAULTS
from benchmarks.faults.grey.run import inject, injections
from benchmarks.faults.kills import Killer, names_of
from benchmarks.faults.streams import image_traffic
from benchmarks.faults.streams.images import image_cluster
from benchmarks.faults.traffic import Edge, Surprise
from octavo import AsyncClient, SamplingParams
from octavo.client.errors import OctavoError
from tests.support.ports import free_ports

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


# Small limits for messages and for slow readers' buffers: requests reach both sooner.
SOAK_FLAGS = (*FLAGS, f"--max-message-bytes={MAX_MESSAGE_BYTES}", "--stream-buffer-bytes=16384")
_MANNERS = traffic.MANNERS | bad_input.MANNERS
_SURVIVORS = frozenset((Place(Kind.ROUTER, 0), Place(Kind.SCHEDULER, 0), Place(Kind.WORKER, 0, 0)))
# Mean seconds between two requests of one client, and between a fault's end and the next fault.
_PAUSE_S, _FAULT_PAUSE_S = 0.3, 12.0
# Faults stop after this share of the time, so that restarted processes run long enough to show leaks.
_SHARE_WITH_FAULTS = 0.7
# Share of the faults that are grey, with --grey, and the longest in seconds: longer than hang_timeout.
_SHARE_GREY, _LONGEST_GREY_S = 2 / 3, 30.0
# Within this time gRPC has closed what it closes by itself.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    seconds: float
    ends: Counter[str]
    # A sentence for each.
    kills: list[str]
    grey: list[str]
    surprises: list[str]
    # Seconds from the last request until nothing was held any more.
    rest_s: float
    growths: list[Growth]
    # See streams.image_traffic.Peaks.
    peaks_mib: dict[str, float] = field(default_factory=dict)

    @property
    def leaks(self) -> list[str]:
        return [leak for growth in self.growths for leak in growth.leaks]

    @property
    def is_clean(self) -> bool:
        return not self.leaks and not self.surprises


@dataclass(slots=True)
class _Clients:
    """Clients that send random requests at random times."""

    edge: Edge
    seed: int
    # Weights of the kinds of requests.
    manners: Mapping[traffic.Manner, int]
    ends: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)

    async def each_manner_once(self) -> None:
        """Sends a request of each kind, so that what processes create at the first of a kind exists already."""
        for manner in self.manners:
            await self._request(manner, random.Random(f"{self.seed}/{manner.__name__}"))

    async def come(self, index: int, stop: asyncio.Event) -> None:
        """Sends one request after the other until `stop` is set."""
        choose = random.Random(f"{self.seed}/{index}")
        manners, weights = list(self.manners), list(self.manners.values())
        while not stop.is_set():
            await asyncio.sleep(choose.expovariate(1 / _PAUSE_S))
            await self._request(choose.choices(manners, weights)[0], choose)

    async def _request(self, manner: traffic.Manner, choose: random.Random) -> None:
        name = manner.__name__
        try:
            self.ends[f"{name}: {await manner(self.edge, choose)}"] += 1
        except (OctavoError, Surprise, TimeoutError) as error:
            self.surprises.append(f"{name}: {error!r}")


@dataclass(slots=True)
class _Faults:
    """Faults that happened, in sentences. ground: grey ones may happen, too."""

    cluster: Cluster
    ground: Ground | None
    seed: int
    say: Say
    kills: list[str] = field(default_factory=list)
    grey: list[str] = field(default_factory=list)
    # Replacements without need.
    surprises: list[str] = field(default_factory=list)

    async def happen(self, until: float) -> None:
        """Lets them happen at random times until `until`, a time of time.monotonic()."""
        choose = random.Random(f"{self.seed}/faults")
        while True:
            pause = choose.expovariate(1 / _FAULT_PAUSE_S)
            if time.monotonic() + pause > until:
                return
            await asyncio.sleep(pause)
            if self.ground is not None and choose.random() < _SHARE_GREY:
                await self._inject(self.ground, choose)
            else:
                await self._kill(choose)

    async def _kill(self, choose: random.Random) -> None:
        mortals = [place for place in self.cluster.places() if place not in _SURVIVORS]
        victims = tuple(choose.sample(mortals, choose.choice([1, 1, 1, 2])))
        back_after = await Killer(self.cluster, lambda: None).kill(victims)
        self.kills.append(f"{names_of(victims)}; served again after {back_after:.1f} s")
        self.say(f"killed {self.kills[-1]}")

    async def _inject(self, ground: Ground, choose: random.Random) -> None:
        kinds = [fault for fault in FAULTS.values() if not fault.missing() and not fault.needs_weights]
        (injection,) = injections([choose.choice(kinds)], 1, choose.randrange(2**31), longest=_LONGEST_GREY_S)
        hit = await inject(ground, injection, self.say)
        name = injection.fault.name
        self.grey.append(f"{name}: {', '.join(hit.blow.victims)}")
        self.surprises += [f"{name}: {process} was restarted without need" for process in hit.unexpected]
        self.surprises += [f"{name}: {text}" for verdict in hit.blow.verdicts for text in verdict.found]


async def run_soak(
    cluster: Cluster,
    *,
    seconds: float,
    num_clients: int,
    seed: int,
    say: Say,
    kills: bool = True,
    ground: Ground | None = None,
    has_images: bool = False,
) -> Report:
    """Runs the load on a cluster that serves, with HTTP. kills: processes are killed meanwhile. ground: the cluster's;
    there are grey failures, too. has_images: see streams.images.image_cluster."""
    routers = range(cluster.options.num_routers)
    edge = Edge(targets=cluster.targets, http_ports=[cluster.options.router_http_port(router) for router in routers])
    clients = _Clients(edge, seed, image_traffic.MANNERS if has_images else _MANNERS)
    await clients.each_manner_once()
    before = await _levels_at_rest(cluster)
    say(
        "at rest: "
        + ", ".join(f"{name} has {level.num_descriptors}" for name, level in before.items())
        + " descriptors"
    )
    began = time.monotonic()
    stop, faults, peaks = asyncio.Event(), _Faults(cluster, ground, seed, say), image_traffic.Peaks(cluster)
    async with asyncio.TaskGroup() as tasks:
        if has_images:
            tasks.create_task(peaks.watch(stop))
        for index in range(num_clients):
            tasks.create_task(clients.come(index, stop))
        # Killed processes serve again once they produce tokens: clients stay until then.
        if kills:
            await faults.happen(began + _SHARE_WITH_FAULTS * seconds)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        stop.set()
    loaded_s, ended = time.monotonic() - began, time.monotonic()
    say(f"{clients.ends.total()} requests in {loaded_s:.0f} s")
    await _compute_little(cluster)
    growths = await rest(cluster, before, patience_s=_PATIENCE_S)
    return Report(
        seconds=round(loaded_s, 1),
        ends=clients.ends,
        kills=faults.kills,
        grey=faults.grey,
        surprises=clients.surprises + faults.surprises + peaks.surprises,
        rest_s=round(time.monotonic() - ended, 1),
        growths=growths,
        peaks_mib=peaks.mib,
    )


async def _compute_little(cluster: Cluster) -> None:
    """Computes a token or two at each replica: these plans free the rows of sequences that ended before."""
    async with AsyncClient(cluster.targets[0], retry_for=_PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
        for _ in range(2 * NUM_REPLICAS):
            tasks.create_task(client.generate([5], SamplingParams(max_tokens=2)))


async def _levels_at_rest(cluster: Cluster) -> dict[str, Level]:
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        levels = await read_levels(cluster)
        if not any(level.held for level in levels.values()):
            return levels
        if time.monotonic() > give_up:
            raise TimeoutError(f"the cluster is not idle before the load: {levels}")
        await asyncio.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients")
    parser.add_argument("--grey", action="store_true", help="grey failures as well as kills")
    parser.add_argument("--images", action="store_true", help="requests with images, of a tiny Qwen2.5-VL")
    add_arguments(parser, seed_of="load and faults")
    arguments = parser.parse_args()
    if arguments.images and arguments.grey:
        parser.error("--images and --grey: give one of them")
    flags = (*SOAK_FLAGS, f"--http-port={free_ports(NUM_ROUTERS)}")

    def stand(directory: Path) -> AbstractContextManager[Plain | Ground]:
        if arguments.images:
            return image_cluster(directory, *image_traffic.FLAGS, f"--http-port={free_ports(NUM_ROUTERS)}")
        return standing(directory, *flags, has_weights=False) if arguments.grey else plain(directory, *flags)

    def run(site: Plain | Ground, seed: int, say: Say) -> Coroutine[Any, Any, Report]:
        return run_soak(
            site.cluster,
            seconds=60 * arguments.minutes,
            num_clients=arguments.clients,
            seed=seed,
            say=say,
            ground=site if isinstance(site, Ground) else None,
            has_images=arguments.images,
        )

    return run_command(arguments, stand, run, as_json=_as_json, summary=summary)


def _as_json(report: Report) -> dict[str, object]:
    return {
        "clean": report.is_clean,
        "seconds": report.seconds,
        "rest_s": report.rest_s,
        "leaks": report.leaks,
        "surprises": report.surprises,
        "kills": report.kills,
        "grey": report.grey,
        "ends": report.ends,
        "peaks_mib": report.peaks_mib,
        "processes": [growth.as_json() for growth in report.growths],
    }


def summary(report: Report) -> str:
    """Formats the report for people."""
    lines = ["", "how requests ended"]
    lines += [f"  {count:6}  {end}" for end, count in sorted(report.ends.items())]
    lines += ["", "process         descriptors     tasks   rows          MiB  (*: never restarted)"]
    for growth in report.growths:
        before, after = growth.before, growth.after
        counts = f"{before.num_descriptors:5} -> {after.num_descriptors:3} {before.num_tasks:5} -> {after.num_tasks:3}"
        memory = f"{before.rss_mib:7.0f} -> {after.rss_mib:4.0f}"
        lines.append(f"{growth.name:14} {counts} {after.num_rows:6} {memory}  {'*' * growth.is_same}")
    kinds = Counter(each.partition(":")[0] for each in report.grey)
    lines += ["", f"{len(report.grey)} grey failures of {len(kinds)} kinds"] if kinds else []
    lines += ["", *(f"at most {mib:.2f} MiB  {what}" for what, mib in report.peaks_mib.items())]
    lines += ["", f"{len(report.kills)} kills; at rest {report.rest_s:.1f} s after the last request"]
    lines += [f"LEFT OVER: {leak}" for leak in report.leaks] or ["nothing is left over"]
    lines += [f"SURPRISE: {surprise}" for surprise in report.surprises]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
