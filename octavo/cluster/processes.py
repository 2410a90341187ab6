"""Defines the processes of a cluster, and the command that starts each."""

import sys
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from pathlib import Path

from configs.options import Options
from configs.programs import module_of


class Stage(IntEnum):
    """A kind of process. Draining goes in this order: each kind ends before those it depends on."""

    ROUTER = 0
    SCHEDULER = 1
    WORKER = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """Processes that are of no use without each other, and fail together. name: for people. replicas: the numbers of
    those that it is, one, or all that compute in lockstep; none: it is a router process."""

    name: str
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process. name: for people, such as "worker 0.0". health_port: the port of its /health; 0: none. wave:
    processes with the same number start together. unit: None: nothing goes on without it."""

    name: str
    stage: Stage
    command: tuple[str, ...]
    health_port: int = 0
    wave: int = 0
    unit: Unit | None = None


def cluster_processes(options: Options, config: Path, *, num_cores: int) -> list[ProcessSpec]:
    """The routers, and each replica's scheduler and workers, all reading `config`.

    Workers come first: they take longest to load. Each process of a replica keeps a core busy while it starts, so a
    wave has only as many replicas as there are cores for: otherwise all replicas would be ready late, instead of the
    first one early. The workers of a replica start together, and so do replicas in lockstep.
    """
    replicas_a_wave = max(1, num_cores // (options.world_size + 1))
    if options.in_lockstep:
        replicas_a_wave = options.data_parallel_size

    units = replica_units(options)
    processes: list[ProcessSpec] = []
    for replica in range(options.data_parallel_size):
        processes += [
            ProcessSpec(
                name=f"worker {replica}.{rank}",
                stage=Stage.WORKER,
                command=process_command(Stage.WORKER, config, "--replica", str(replica), "--rank", str(rank)),
                health_port=options.process_metrics_port("worker", replica, rank),
                wave=replica // replicas_a_wave,
                unit=units[replica],
            )
            for rank in range(options.world_size)
        ]
    processes += [
        ProcessSpec(
            name=f"scheduler {replica}",
            stage=Stage.SCHEDULER,
            command=process_command(Stage.SCHEDULER, config, "--replica", str(replica)),
            health_port=options.process_metrics_port("scheduler", replica),
            wave=replica // replicas_a_wave,
            unit=units[replica],
        )
        for replica in range(options.data_parallel_size)
    ]
    routers = product(range(options.num_routers), range(options.api_server_count))
    processes += [
        ProcessSpec(
            name=_router_name(options, router, process),
            stage=Stage.ROUTER,
            command=process_command(Stage.ROUTER, config, "--router", str(router), *_sharing(options, process)),
            health_port=options.process_metrics_port("router", router, process),
            unit=Unit(_router_name(options, router, process)),
        )
        for router, process in routers
    ]
    return processes


def process_command(stage: Stage, config: Path, *arguments: str) -> tuple[str, ...]:
    """Returns the command of a process that reads `config`, with the interpreter and the Octavo that run here."""
    return (sys.executable, "-m", module_of(stage.name.lower()), "-c", str(config), *arguments)


def replica_units(options: Options) -> list[Unit]:
    """Returns each replica's unit. Those in lockstep are one: a step of each needs all others."""
    count = options.data_parallel_size
    if options.in_lockstep:
        return [Unit(f"replicas 0 to {count - 1}", tuple(range(count)))] * count
    return [Unit(f"replica {replica}", (replica,)) for replica in range(count)]


def _router_name(options: Options, router: int, process: int) -> str:
    if options.num_router_processes == 1:
        return "router"
    return f"router {router}" if options.api_server_count == 1 else f"router {router}.{process}"


def _sharing(options: Options, process: int) -> tuple[str, ...]:
    """Arguments that let the processes of one router, and only those, share its ports."""
    return () if options.api_server_count == 1 else ("--process", str(process))
