"""Ranks as threads of one process, connected by gloo over loopback."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import FileStore

from worker.parallel.axes import Axes
from worker.parallel.gloo import GlooGroup
from worker.parallel.group_init import connect_ranks
from worker.parallel.groups import Groups

_T = TypeVar("_T")


def run_ranks(directory: Path, size: int, of_rank: Callable[[GlooGroup], _T]) -> list[_T]:
    """Runs of_rank at all ranks of a tensor group at the same time; returns the results in order."""
    file = directory / "rendezvous"

    def rank(number: int) -> _T:
        store = FileStore(str(file), size)
        group = GlooGroup(
            f"tensor group of {size}", store, number, size, host="127.0.0.1", connect_timeout=60, call_timeout=60
        )
        return of_rank(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def run_replicas(directory: Path, axes: Axes, of_rank: Callable[[int, int, Groups], _T]) -> list[list[_T]]:
    """Runs of_rank at all ranks of all replicas at the same time; returns the results: [replica][rank]."""
    address = f"file:{directory / 'rendezvous-of-replicas'}"

    def at(global_rank: int) -> _T:
        replica, rank = divmod(global_rank, axes.world_size)
        groups = connect_ranks(address, axes, rank, replica, call_timeout=60, while_waiting=lambda: None)
        try:
            return of_rank(replica, rank, groups)
        finally:
            # Makes ranks that wait for a failed one fail, too.
            groups.leave()

    with ThreadPoolExecutor(axes.num_ranks) as threads:
        done = list(threads.map(at, range(axes.num_ranks)))
    return [done[first : first + axes.world_size] for first in range(0, axes.num_ranks, axes.world_size)]
