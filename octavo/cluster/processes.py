"""Which processes make up a cluster, and how each is started."""

import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from configs.options import Options


class Stage(IntEnum):
    """Draining goes in this order: each kind ends before what it depends on."""

    ROUTER = 0
    SCHEDULER = 1
    WORKER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process. name: for people, such as "worker 0.0". health_port: of its /health; 0: it has none."""

    name: str
    stage: Stage
    command: tuple[str, ...]
    health_port: int = 0


def cluster_processes(options: Options, config: Path) -> list[ProcessSpec]:
    """The router, and each replica's scheduler and workers, all reading `config`.

    Workers come first: they take longest to load.
    """

    def command(module: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", module, "-c", str(config), *arguments)

    processes: list[ProcessSpec] = []
    for replica in range(options.data_parallel_size):
        processes += [
            ProcessSpec(
                name=f"worker {replica}.{rank}",
                stage=Stage.WORKER,
                command=command("worker", "--replica", str(replica), "--rank", str(rank)),
                health_port=options.process_metrics_port("worker", replica, rank),
            )
            for rank in range(options.world_size)
        ]
    processes += [
        ProcessSpec(
            name=f"scheduler {replica}",
            stage=Stage.SCHEDULER,
            command=command("scheduler", "--replica", str(replica)),
            health_port=options.process_metrics_port("scheduler", replica),
        )
        for replica in range(options.data_parallel_size)
    ]
    router = ProcessSpec(
        name="router",
        stage=Stage.ROUTER,
        command=command("router"),
        health_port=options.process_metrics_port("router"),
    )
    return [*processes, router]
