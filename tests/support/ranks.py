"""Ranks of a tensor-parallel group as threads of one process, connected by gloo over loopback."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import FileStore

from worker.parallel.gloo import GlooGroup

_T = TypeVar("_T")


def run_ranks(directory: Path, size: int, of_rank: Callable[[GlooGroup], _T]) -> list[_T]:
    """What of_rank gives at each rank, in order; they run at the same time."""
    file = directory / "rendezvous"

    def rank(number: int) -> _T:
        store = FileStore(str(file), size)
        group = GlooGroup(
            f"tensor group of {size}", store, number, size, host="127.0.0.1", connect_timeout=60, call_timeout=60
        )
        return of_rank(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))
