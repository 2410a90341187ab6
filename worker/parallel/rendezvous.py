"""How the ranks of an epoch find each other."""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from worker.errors import PlanError
from worker.parallel.axes import Axes
from worker.parallel.gloo import GlooGroup

# Between looks at who has come.
_PAUSE_S = 0.02
# Once all have come, connecting takes milliseconds.
_CONNECT_S = 10.0
_LOOPBACK = "127.0.0.1"


def meet(address: str, axes: Axes, rank: int, *, call_timeout: float, while_waiting: Callable[[], None]) -> GlooGroup:
    """Connects with the other ranks of this one's tensor group, once all ranks of the replica are there.

    address: of step_pb2.Reset, "file:PATH" for ranks of one machine. call_timeout: seconds that each of the group's
    calls may take. while_waiting: called again and again until all are there, which may take as long as loading
    weights; may raise. Raises PlanError for another kind of address, CollectiveError if ranks vanish while they
    connect.
    """
    kind, _, path = address.partition(":")
    if kind != "file" or not path:
        raise PlanError(f"rendezvous: {address!r} is not of the form file:PATH")
    store = FileStore(path, axes.world_size)
    _wait_for_all(store, axes, rank, while_waiting)
    members = axes.tensor_group(rank)
    return GlooGroup(
        f"tensor group of ranks {', '.join(map(str, members))}",
        PrefixStore(f"tensor {axes.stage(rank)}", store),
        axes.tensor_rank(rank),
        axes.tensor_size,
        host=_LOOPBACK,
        connect_timeout=_CONNECT_S,
        call_timeout=call_timeout,
    )


def _wait_for_all(store: Store, axes: Axes, rank: int, while_waiting: Callable[[], None]) -> None:
    store.set(_name(rank), "here")
    everybody = [_name(each) for each in range(axes.world_size)]
    while not store.check(everybody):
        while_waiting()
        time.sleep(_PAUSE_S)


def _name(rank: int) -> str:
    return f"rank {rank}"
