"""A cluster for grey failures: with relays between its processes, a small disk, and a wall clock that can be set."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.cluster import Cluster, Kind, Place, until
from benchmarks.faults.command import FLAGS, NUM_REPLICAS, NUM_ROUTERS, NUM_STAGES
from benchmarks.faults.grey.means.fake_clock import FakeClock
from benchmarks.faults.grey.means.relay import Relay, Relays
from benchmarks.faults.grey.means.small_disk import SmallDisk
from runtime.security.curve import make_keys
from tests.support.ports import free_ports

# A scheduler listens at three ports: for routers, for plans, and at the next one for heartbeats.
_PORTS = 3
# Room for the weights of both stages in float32, and for the traces.
_DISK_MIB, _DISK_MIB_WITH_WEIGHTS = 32, 1700


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """router_links: the relays between the routers and each scheduler. worker_links: for each scheduler, those of plans
    and of heartbeats. has_weights: the packed weights are on the small disk, too."""

    cluster: Cluster
    relays: Relays
    router_links: list[Relay]
    worker_links: list[tuple[Relay, Relay]]
    disk: SmallDisk
    clock: FakeClock
    has_weights: bool

    def process(self, place: Place) -> psutil.Process:
        return self.cluster.processes()[place]

    @property
    def supervisor(self) -> psutil.Process:
        return psutil.Process(self.cluster.up.process.pid)

    def writers(self) -> list[psutil.Process]:
        return [self.supervisor, *self.cluster.processes().values()]

    async def is_serving(self) -> bool:
        """Returns whether all processes are there and well, and all routers see all replicas as ready."""
        cluster = self.cluster
        if set(cluster.processes()) != set(cluster.places()):
            return False
        well = await asyncio.gather(*(cluster.is_healthy(place) for place in cluster.places()))
        ready = await asyncio.gather(*(cluster.is_ready(number) for number in range(NUM_REPLICAS)))
        return all(well) and all(ready)

    async def wait_until_serving(self, after: str) -> None:
        """Raises TimeoutError if it does not serve again within two minutes."""
        await until(self.is_serving, f"readiness after {after}")


@contextlib.contextmanager
def standing(directory: Path, *flags: str, has_weights: bool) -> Iterator[Ground]:
    """Starts a cluster with all of it, and waits until it serves."""
    with ExitStack() as held:
        size = _DISK_MIB_WITH_WEIGHTS if has_weights else _DISK_MIB
        disk = held.enter_context(SmallDisk(directory / "disk", mebibytes=size))
        own, relayed = free_ports(NUM_REPLICAS * _PORTS), free_ports(NUM_REPLICAS * _PORTS)
        relays = held.enter_context(Relays([(relayed + i, own + i) for i in range(NUM_REPLICAS * _PORTS)]))
        clock = FakeClock(directory)
        make_keys(directory / "keys")
        environment: dict[str, Any] = dict(clock.environment)
        if has_weights:
            environment["OCTAVO_CACHE_DIR"] = str(_cache_on(disk.path))
        seen_at = _addresses(relayed, "")
        cluster = held.enter_context(
            Cluster(
                directory,
                *FLAGS,
                f"--trace={disk.path / 'run.trace'}",
                f"--curve-dir={directory / 'keys'}",
                f"--scheduler-addresses={','.join(_addresses(own, ''))}",
                f"--step-addresses={','.join(_addresses(own + 1, 'tcp://'))}",
                *flags,
                num_replicas=NUM_REPLICAS,
                num_stages=NUM_STAGES,
                num_routers=NUM_ROUTERS,
                seen_at=seen_at,
                runtime_dir=disk.path / "runtime",
                output_to=disk.path / "octavo.log",
                command=_command(seen_at, _addresses(relayed + 1, "tcp://")),
                **environment,
            )
        )
        cluster.wait_until_all_serve()
        yield Ground(
            cluster=cluster,
            relays=relays,
            router_links=relays.all[::_PORTS],
            worker_links=list(zip(relays.all[1::_PORTS], relays.all[2::_PORTS], strict=True)),
            disk=disk,
            clock=clock,
            has_weights=has_weights,
        )


def _addresses(first: int, scheme: str) -> list[str]:
    return [f"{scheme}127.0.0.1:{first + replica * _PORTS}" for replica in range(NUM_REPLICAS)]


def _command(schedulers: list[str], steps: list[str]) -> tuple[str, ...]:
    flags = {
        Kind.ROUTER: ["--scheduler-addresses", ",".join(schedulers)],
        Kind.WORKER: ["--step-addresses", ",".join(steps)],
    }
    return (sys.executable, "-m", "benchmarks.faults.grey.means.relayed_up", json.dumps(flags))


def _cache_on(disk: Path) -> Path:
    """Makes a cache there, with this user's compiled kernels and tokenizers but without weights."""
    usual = Path(os.environ.get("OCTAVO_CACHE_DIR", Path.home() / ".cache" / "octavo"))
    cache = disk / "cache"
    cache.mkdir(mode=0o700)
    for name in ("kernels", "tokenizers"):
        if (usual / name).is_dir():
            shutil.copytree(usual / name, cache / name)
    return cache
