"""The settings that each process of a cluster on Ray starts with, once its scheduler's address is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from configs.options import Options
from octavo.ray.host import DIRECTORY
from octavo.ray.placement import threads_of

# Files in the directory that `octavo keys` makes. A worker's node gets only these.
_WORKER_KEYS = ("worker.key_secret", "scheduler.key")
_SCHEDULER_KEYS = ("scheduler.key_secret", "allowed_workers/worker.key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The arguments of octavo.ray.host.ProcessHost.run."""

    arguments: tuple[str, ...] = ()
    # YAML.
    options: str
    files: dict[str, str] = field(default_factory=dict)


def router_settings(options: Options) -> ProcessSettings:
    """The router's settings: it reads each replica's address from a file, scheduler-<replica>."""
    files = tuple(f"file:{DIRECTORY}/scheduler-{replica}" for replica in range(options.data_parallel_size))
    return ProcessSettings(options=_yaml(options, scheduler_addresses=files))


def scheduler_settings(
    options: Options, keys: Mapping[str, str], replica: int, place: tuple[str, int]
) -> ProcessSettings:
    """place: the scheduler's node address and the first of its ports."""
    return ProcessSettings(
        arguments=("--replica", str(replica)),
        options=_yaml(options, **_addresses(options, place)),
        files={f"keys/{name}": keys[name] for name in _SCHEDULER_KEYS},
    )


def worker_settings(
    options: Options, keys: Mapping[str, str], replica: int, rank: int, scheduler: tuple[str, int], address: str
) -> ProcessSettings:
    """scheduler: the scheduler's node address and first port. address: the worker's node address."""
    return ProcessSettings(
        arguments=("--replica", str(replica), "--rank", str(rank)),
        options=_yaml(
            options, worker_host=address, worker_threads=threads_of(options), **_addresses(options, scheduler)
        ),
        files={f"keys/{name}": keys[name] for name in _WORKER_KEYS},
    )


def _addresses(options: Options, place: tuple[str, int]) -> dict[str, object]:
    """Addresses as lists of one per replica; a process reads only its own replica's entry."""
    host, port = place
    host = f"[{host}]" if ":" in host else host
    return {
        "scheduler_addresses": (f"{host}:{port}",) * options.data_parallel_size,
        "step_addresses": (f"tcp://{host}:{port + 1}",) * options.data_parallel_size,
        "curve_dir": f"{DIRECTORY}/keys",
    }


def _yaml(options: Options, **changes: object) -> str:
    values = options.model_copy(update={**changes, "runtime_dir": DIRECTORY}).as_file()
    return yaml.safe_dump(values, sort_keys=False)
