"""Common parts of the commands that disturb a cluster: the cluster, a seed that is printed, a line about each event, a
report."""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.faults.cluster import Cluster

NUM_REPLICAS = NUM_STAGES = NUM_ROUTERS = 2
# Limits so small that streams also wait for rows and KV blocks.
FLAGS = (
    "--dtype=float32",
    "--worker-threads=1",
    "--kv-cache-memory=0.1",
    "--max-num-seqs=32",
    "--preemption-mode=swap",
    "--swap-space=0.05",
    "--scheduling-policy=priority",
    "--max-restarts=1000",
)

Say = Callable[[str], None]


class _Report(Protocol):
    @property
    def is_clean(self) -> bool: ...


class _Site(Protocol):
    """A cluster, or a thing that has one."""

    @property
    def cluster(self) -> Cluster: ...


_R = TypeVar("_R", bound=_Report)
_S = TypeVar("_S", bound=_Site)


@dataclass(frozen=True, slots=True)
class Plain:
    """A cluster with nothing around it."""

    cluster: Cluster


@contextlib.contextmanager
def plain(
    directory: Path, *flags: str, num_stages: int = NUM_STAGES, tensor_size: int = 1, **up: Any
) -> Iterator[Plain]:
    """Starts a cluster, and waits until it serves. up: parameters of Up."""
    sizes = {"num_replicas": NUM_REPLICAS, "num_stages": num_stages, "tensor_size": tensor_size}
    with Cluster(directory, *flags, num_routers=NUM_ROUTERS, **sizes, **up) as cluster:
        cluster.wait_until_all_serve()
        yield Plain(cluster)


def add_arguments(parser: argparse.ArgumentParser, *, seed_of: str) -> None:
    parser.add_argument(
        "--seed", type=int, default=None, help=f"seed of {seed_of}; default: a random one, which is printed"
    )
    parser.add_argument("--log", type=Path, help="file for the cluster's output")
    parser.add_argument("--json", action="store_true", help="one line")


def run_command(
    arguments: argparse.Namespace,
    stand: Callable[[Path], AbstractContextManager[_S]],
    run: Callable[[_S, int, Say], Coroutine[Any, Any, _R]],
    *,
    as_json: Callable[[_R], Mapping[str, object]],
    summary: Callable[[_R], str],
) -> int:
    """Calls `run` with the cluster that `stand` starts in a directory, the seed, and a function that prints progress;
    prints its report. Returns the exit code: 1 if the report is not clean."""
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    began = time.monotonic()

    def say(text: str) -> None:
        if not arguments.json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as site:
        say(f"{len(site.cluster.places())} processes serve")
        try:
            report = asyncio.run(run(site, seed, say))
        finally:
            if arguments.log:
                arguments.log.write_text(site.cluster.up.output)
    print(json.dumps({"seed": seed, **as_json(report)}) if arguments.json else summary(report))
    return 0 if report.is_clean else 1
