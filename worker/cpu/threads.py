"""Chooses the number of threads and the cores that a worker computes on."""

import os

import torch

from configs.groups.parallel import parse_core_lists
from configs.options import Options
from kernels.native.cores import num_usable_cores, usable_cores, usable_cores_by_node
from worker.errors import PermanentError


def prepare_threads(options: Options, replica: int = 0, rank: int = 0) -> list[int]:
    """Sets the number of torch's threads, which the C++ kernels adopt. Call it before anything computes.

    Returns the cores to bind the worker's threads to once its weights are loaded; empty if worker_cpus is "none". Also
    restricts the calling thread, and threads that it starts later, to these cores, so that memory comes from their NUMA
    node. Raises PermanentError for cores that this process may not use.
    """
    worker = replica * options.world_size + rank
    num_workers = options.data_parallel_size * options.world_size
    if options.worker_cpus == "none":
        torch.set_num_threads(options.worker_threads or max(1, num_usable_cores() // num_workers))
        return []
    cores = _own_cores(options.worker_cpus, worker, num_workers)
    torch.set_num_threads(options.worker_threads or len(cores))
    os.sched_setaffinity(0, cores)
    return cores


def _own_cores(worker_cpus: str, worker: int, num_workers: int) -> list[int]:
    if worker_cpus == "auto":
        return _share(usable_cores_by_node(), worker, num_workers, worker_cpus)
    lists = parse_core_lists(worker_cpus)
    usable = usable_cores()
    missing = sorted({core for each in lists for core in each} - set(usable))
    if missing:
        raise PermanentError(
            f"worker_cpus={worker_cpus!r}: this process may not run on core {missing[0]}; it may run on "
            f"{', '.join(map(str, usable))}"
        )
    if len(lists) == 1:
        return _share(lists[0], worker, num_workers, worker_cpus)
    if len(lists) != num_workers:
        raise PermanentError(
            f"worker_cpus={worker_cpus!r} has {len(lists)} lists of cores for {num_workers} workers: give one list for "
            f"each worker, or a single list that is divided among them"
        )
    return lists[worker]


def _share(cores: list[int], worker: int, num_workers: int, worker_cpus: str) -> list[int]:
    if len(cores) < num_workers:
        raise PermanentError(
            f"worker_cpus={worker_cpus!r}: {len(cores)} cores are too few for {num_workers} workers; give at least one "
            f"core for each, or worker_cpus=none"
        )
    return cores[len(cores) * worker // num_workers : len(cores) * (worker + 1) // num_workers]
