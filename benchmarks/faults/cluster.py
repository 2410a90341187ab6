"""A cluster on this machine whose processes can be found, asked for their metrics, and killed."""

import asyncio
import http.client
import itertools
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from configs.options import Options
from octavo import AsyncClient, SamplingParams
from octavo.client.admin import Admin
from octavo.cluster.readiness import read_health
from tests.support.ports import free_ports
from tests.support.up import Up

_POLL_S = 0.1
_ASK_TIMEOUT_S = 5.0
# A worker is back within 3 s on two idle cores; the cores may be busy, though.
PATIENCE_S = 120.0
_EPOCH, _TOKENS = "octavo_worker_epoch", "octavo_generation_tokens_total"


class Kind(StrEnum):
    """A kind of process, as in `python -m KIND`."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    ROUTER = "router"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A role that one process after another fills. number: of the replica or router; rank: a worker's."""

    kind: Kind
    number: int
    rank: int = 0

    def __str__(self) -> str:
        return f"worker {self.number}.{self.rank}" if self.kind is Kind.WORKER else f"{self.kind} {self.number}"


# Counters that a report sums over all processes.
_COUNTERS = {
    Kind.ROUTER: ("octavo_resubmissions_total", "octavo_inexact_resumes_total"),
    Kind.SCHEDULER: ("octavo_num_preemptions_total",),
    Kind.WORKER: (),
}


class Samples(dict[tuple[str, tuple[tuple[str, str], ...]], float]):
    """Values from /metrics, by name and sorted labels."""

    def value(self, name: str, **labels: str) -> float:
        """Returns one sample; 0 if there is none."""
        return self.get((name, tuple(sorted(labels.items()))), 0.0)


class Cluster:
    """`octavo up` with several routers. Leaving the context ends all processes."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        num_replicas: int,
        num_stages: int,
        num_routers: int,
        tensor_size: int = 1,
        seen_at: Sequence[str] = (),
        **up: Any,
    ) -> None:
        """seen_at: addresses at which routers reach the schedulers, if not at those of the options. up: parameters of
        Up."""
        num_processes = num_routers + num_replicas * (1 + num_stages * tensor_size)
        self.up = Up(
            directory,
            f"--data-parallel-size={num_replicas}",
            f"--pipeline-parallel-size={num_stages}",
            f"--num-routers={num_routers}",
            f"--tensor-parallel-size={tensor_size}",
            *flags,
            real=True,
            port=free_ports(num_routers),
            metrics_port=free_ports(num_processes),
            **up,
        )
        self._seen_at = seen_at
        self._options: Options | None = None
        # Counts of the processes that were killed.
        self._lost = Counter[str]()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.up.__exit__(error)

    @property
    def options(self) -> Options:
        """The options of its processes; readable once it serves."""
        if self._options is None:
            path = self.up.runtime_dir / "options.yaml"
            self._options = Options(**yaml.safe_load(path.read_text()))
        return self._options

    def wait_until_all_serve(self) -> None:
        """Waits for all ranks. Raises AssertionError, with the cluster's output, if that takes more than a minute."""
        self.up.wait_for("serving; Ctrl-C to stop")
        self.up.wait_for("ready for epoch", count=self.options.data_parallel_size * self.options.world_size)

    @property
    def targets(self) -> list[str]:
        """The gRPC addresses of its routers."""
        options = self.options
        return [f"127.0.0.1:{options.router_port(router)}" for router in range(options.num_routers)]

    def places(self, *kinds: Kind) -> list[Place]:
        """The places of the given kinds; without kinds, all."""
        options, kinds = self.options, kinds or tuple(Kind)
        replicas = range(options.data_parallel_size)
        all_places = [Place(Kind.WORKER, replica, rank) for replica in replicas for rank in range(options.world_size)]
        all_places += [Place(Kind.SCHEDULER, replica) for replica in replicas]
        all_places += [Place(Kind.ROUTER, router) for router in range(options.num_routers)]
        return [place for place in all_places if place.kind in kinds]

    def processes(self) -> dict[Place, psutil.Process]:
        """The processes that run now."""
        found = {}
        for child in self.up.children():
            try:
                arguments = child.cmdline()
            except psutil.Error:
                # The process has ended since it was listed.
                continue
            place = place_of(arguments)
            if place is not None:
                found[place] = child
        return found

    def kill(self, places: Sequence[Place]) -> None:
        """Sends SIGKILL to one right after the other, and waits until they have ended."""
        processes = self.processes()
        victims = [processes[place] for place in places]
        for victim in victims:
            victim.kill()
        _, alive = psutil.wait_procs(victims, timeout=PATIENCE_S)
        assert not alive, f"still there after SIGKILL: {alive}"

    async def kill_and_wait(self, victims: Sequence[Place]) -> None:
        """Kills processes, and waits until each has done its work once more. Raises TimeoutError."""
        names = " and ".join(map(str, victims))
        replicas = {place.number for place in victims if place.kind is not Kind.ROUTER}
        routers = [place for place in victims if place.kind is Kind.ROUTER]
        epochs = {replica: await self._of_scheduler(replica, _EPOCH) for replica in replicas}
        self._lost += await self._counts(victims)
        await asyncio.to_thread(self.kill, victims)
        await until(lambda: self._are_ready(routers, epochs), f"readiness after the kill of {names}")
        computed = {replica: await self._of_scheduler(replica, _TOKENS) for replica in replicas}
        for router in routers:
            await self._ask(router)
        asked = itertools.cycle(self.places(Kind.ROUTER))
        await until(lambda: self._compute(computed, next(asked)), f"tokens of each replica after the kill of {names}")

    async def counters(self) -> Counter[str]:
        """Sums the counters over all processes, without counts between the last look and a kill."""
        return self._lost + await self._counts(self.places())

    async def is_serving(self) -> bool:
        """Returns whether all processes are there and well, and all routers see all replicas as ready."""
        if set(self.processes()) != set(self.places()):
            return False
        well = await asyncio.gather(*map(self.is_healthy, self.places()))
        return all(well) and all(await asyncio.gather(*map(self.is_ready, range(self.options.data_parallel_size))))

    def forget_prefixes(self) -> None:
        """Has all replicas drop their cached KV blocks."""
        with Admin(self.targets[0]) as admin:
            admin.reset_prefix_cache()

    async def samples(self, place: Place) -> Samples | None:
        """The metrics of a process; None while it does not answer."""
        return await asyncio.to_thread(self._samples, place)

    async def is_healthy(self, place: Place) -> bool:
        health = await read_health(self.options.metrics_host, self._port(place))
        return health is not None and health[0]

    async def is_ready(self, replica: int) -> bool:
        """Returns whether all routers see the replica as ready."""
        address = self._seen_at[replica] if self._seen_at else self.options.scheduler_address(replica)
        for router in self.places(Kind.ROUTER):
            samples = await self.samples(router)
            if samples is None or samples.value("octavo_replica_ready", replica=address) != 1:
                return False
        return True

    async def _are_ready(self, routers: Sequence[Place], epochs: Mapping[int, float]) -> bool:
        """Returns whether each replica is in a new epoch (routers may still see the old one) and all routers see it."""
        for replica, epoch in epochs.items():
            if await self._of_scheduler(replica, _EPOCH) <= epoch or not await self.is_ready(replica):
                return False
        return all([await self.is_healthy(router) for router in routers])

    async def _compute(self, computed: Mapping[int, float], router: Place) -> bool:
        """Returns whether all replicas have computed tokens since; if not, asks the router for a token. Routers avoid
        a replica for a while after its Sessions have broken too often, so all streams may be elsewhere."""
        done = all([await self._of_scheduler(replica, _TOKENS) > before for replica, before in computed.items()])
        if not done:
            await self._ask(router)
        return done

    async def _ask(self, router: Place) -> None:
        """Asks this router alone for a token, ahead of the streams that wait (scheduling_policy=priority)."""
        async with AsyncClient(self.targets[router.number], timeout=PATIENCE_S, retry_for=PATIENCE_S) as client:
            await client.generate("One", SamplingParams(max_tokens=1, temperature=0), priority=-1)

    async def _of_scheduler(self, replica: int, name: str) -> float:
        """A metric of the replica's scheduler; 0 while it does not answer."""
        samples = await self.samples(Place(Kind.SCHEDULER, replica))
        return 0.0 if samples is None else samples.value(name)

    async def _counts(self, places: Sequence[Place]) -> Counter[str]:
        counts = Counter[str]()
        for place in places:
            if _COUNTERS[place.kind] and (samples := await self.samples(place)) is not None:
                counts += Counter({name: round(samples.value(name)) for name in _COUNTERS[place.kind]})
        return counts

    def _port(self, place: Place) -> int:
        return self.options.process_metrics_port(place.kind.value, place.number, place.rank)

    def _samples(self, place: Place) -> Samples | None:
        url = f"http://{self.options.metrics_host}:{self._port(place)}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except (OSError, http.client.HTTPException):
            return None
        return Samples(
            ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls until the condition holds. Raises TimeoutError, which names `what`."""
    give_up = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s")
        await asyncio.sleep(_POLL_S)


def place_of(arguments: Sequence[str]) -> Place | None:
    """The place of a process by its command line; None if it is not the cluster's. A module of another package with the
    name of a service stands for it."""
    if arguments[1:2] != ["-m"] or (name := arguments[2].rpartition(".")[2]) not in set(Kind):
        return None
    kind = Kind(name)
    flags = dict(zip(arguments[3::2], arguments[4::2], strict=False))
    number = flags.get("--router" if kind is Kind.ROUTER else "--replica", "0")
    return Place(kind, int(number), int(flags.get("--rank", "0")))
