"""A cluster on this machine whose processes can be found, asked for their metrics, and killed."""

import asyncio
import http.client
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from configs.options import Options
from octavo.cluster.readiness import read_health
from tests.support.ports import free_ports
from tests.support.up import Up

_POLL_S = 0.1
_ASK_TIMEOUT_S = 5.0
# A worker is back within 3 s on two idle cores; the cores may be busy, though.
PATIENCE_S = 120.0


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
