"""A cluster for faults: two replicas of two stages and two routers, and where a fault needs it, relays between its
processes, a small disk, and a wall clock that can be set."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.cluster import Cluster, Kind, Place, until
from benchmarks.faults.means.disk_and_clock import FakeClock, SmallDisk
from benchmarks.faults.means.relay import Relay, Relays
from runtime.security.curve import make_keys
from tests.support.ports import free_ports

# SmolLM2's own template shows no tools.
TOOL_FLAGS = ("--tool-call-parser=hermes", "--trust-request-chat-template")
COMMON_FLAGS = (
    "--dtype=float32",
    "--worker-threads=1",
    "--scheduling-policy=priority",
    "--max-restarts=1000",
    *TOOL_FLAGS,
)
# Limits so small that streams also wait for rows and KV blocks.
FLAGS = (
    *COMMON_FLAGS,
    "--kv-cache-memory=0.1",
    "--max-num-seqs=32",
    "--preemption-mode=swap",
    "--swap-space=0.05",
)
# A scheduler listens at three ports: for routers, for plans, and at the next one for heartbeats.
_PORTS = 3
# Room for the weights of both stages in float32, and for the traces.
_DISK_MIB, _DISK_MIB_WITH_WEIGHTS = 32, 1700


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    replicas: int = 2
    stages: int = 2
    # Ranks that share each layer.
    tensor: int = 1
    routers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """router_links: the relays between the routers and each scheduler. worker_links: for each scheduler, those of plans
    and of heartbeats. has_weights: the packed weights are on the small disk, too."""

    relays: Relays
    router_links: list[Relay]
    worker_links: list[tuple[Relay, Relay]]
    disk: SmallDisk
    clock: FakeClock
    has_weights: bool


@dataclass(slots=True, kw_only=True)
class Ground:
    """directory: has the batches, too. spared: places that no kill takes. is_patient: a fault is over when all
    processes serve again, before the next one may come."""

    cluster: Cluster
    directory: Path
    some_means: Means | None = None
    spared: frozenset[Place] = field(default_factory=frozenset)
    is_patient: bool = True

    @property
    def means(self) -> Means:
        assert self.some_means is not None, "the cluster runs without relays, small disk and clock"
        return self.some_means

    @property
    def http_ports(self) -> list[int]:
        options = self.cluster.options
        return [options.router_http_port(router) for router in range(options.num_routers)]

    def process(self, place: Place) -> psutil.Process:
        return self.cluster.processes()[place]

    @property
    def supervisor(self) -> psutil.Process:
        return psutil.Process(self.cluster.up.process.pid)

    def writers(self) -> list[psutil.Process]:
        return [self.supervisor, *self.cluster.processes().values()]

    async def wait_until_serving(self, after: str) -> None:
        """Raises TimeoutError if it does not serve again within two minutes."""
        await until(self.cluster.is_serving, f"readiness after {after}")


# For processes of a kind, the flags of each replica, or of all of them.
OwnFlags = Mapping[str, Sequence[Sequence[str]]]


@contextlib.contextmanager
def standing(
    directory: Path,
    *flags: str,
    shape: Shape = Shape(),
    own_flags: OwnFlags | None = None,
    has_means: bool = False,
    has_weights: bool = False,
) -> Iterator[Ground]:
    """Starts a cluster, and waits until it serves. own_flags: further ones of some processes."""
    own: dict[str, list[list[str]]] = {kind: [*map(list, each)] for kind, each in (own_flags or {}).items()}
    up: dict[str, Any] = {}
    with ExitStack() as held:
        means = None
        if has_means:
            means, flags_of_means, up = _means(held, directory, shape.replicas, own, has_weights=has_weights)
            flags = (*flags_of_means, *flags)
        if own:
            up["command"] = (sys.executable, "-m", "benchmarks.faults.means.up_with", json.dumps(own))
        cluster = held.enter_context(
            Cluster(
                directory,
                f"--http-port={free_ports(shape.routers)}",
                f"--batches-dir={directory / 'batches'}",
                *flags,
                num_replicas=shape.replicas,
                num_stages=shape.stages,
                num_routers=shape.routers,
                tensor_size=shape.tensor,
                **up,
            )
        )
        cluster.wait_until_all_serve()
        yield Ground(cluster=cluster, directory=directory, some_means=means)


def _means(
    held: ExitStack, directory: Path, num_replicas: int, own: dict[str, list[list[str]]], *, has_weights: bool
) -> tuple[Means, list[str], dict[str, Any]]:
    """Starts the means. Returns them, flags and parameters of the cluster; adds to the processes' own flags."""
    disk = SmallDisk(directory / "disk", mebibytes=_DISK_MIB_WITH_WEIGHTS if has_weights else _DISK_MIB)
    held.enter_context(disk)
    real, relayed = free_ports(num_replicas * _PORTS), free_ports(num_replicas * _PORTS)
    relays = held.enter_context(Relays([(relayed + i, real + i) for i in range(num_replicas * _PORTS)]))
    clock = FakeClock(directory)
    make_keys(directory / "keys")

    def addresses(first: int, scheme: str = "") -> list[str]:
        return [f"{scheme}127.0.0.1:{first + replica * _PORTS}" for replica in range(num_replicas)]

    # Routers and workers dial relays, while schedulers listen at their own addresses.
    for kind, name, dialed in (
        (Kind.ROUTER, "scheduler", addresses(relayed)),
        (Kind.WORKER, "step", addresses(relayed + 1, "tcp://")),
    ):
        own[kind] = [[*each, f"--{name}-addresses", ",".join(dialed)] for each in own.get(kind, [[]])]
    flags = [
        f"--trace={disk.path / 'run.trace'}",
        f"--curve-dir={directory / 'keys'}",
        f"--scheduler-addresses={','.join(addresses(real))}",
        f"--step-addresses={','.join(addresses(real + 1, 'tcp://'))}",
    ]
    up: dict[str, Any] = {
        **clock.environment,
        "seen_at": addresses(relayed),
        "runtime_dir": disk.path / "runtime",
        "output_to": disk.path / "octavo.log",
    }
    if has_weights:
        up["OCTAVO_CACHE_DIR"] = str(_cache_on(disk.path))
    means = Means(
        relays=relays,
        router_links=relays.all[::_PORTS],
        worker_links=list(zip(relays.all[1::_PORTS], relays.all[2::_PORTS], strict=True)),
        disk=disk,
        clock=clock,
        has_weights=has_weights,
    )
    return means, flags, up


def _cache_on(disk: Path) -> Path:
    """Makes a cache there, with this user's compiled kernels and tokenizers but without weights."""
    usual = Path(os.environ.get("OCTAVO_CACHE_DIR", Path.home() / ".cache" / "octavo"))
    cache = disk / "cache"
    cache.mkdir(mode=0o700)
    for name in ("kernels", "tokenizers"):
        if (usual / name).is_dir():
            shutil.copytree(usual / name, cache / name)
    return cache
