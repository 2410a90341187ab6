"""How the ranks of an epoch find each other."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from worker.errors import PlanError
from worker.parallel.axes import Axes
from worker.parallel.gloo import GlooGroup
from worker.parallel.gloo_pipeline import GlooPipeline
from worker.parallel.group import Alone, Group
from worker.parallel.groups import Groups
from worker.parallel.tcp_store import store_at

# Between looks at who has come.
_PAUSE_S = 0.02
# Once all have come, connecting takes milliseconds.
_CONNECT_S = 10.0
# Ranks of one machine talk over it.
LOOPBACK = "127.0.0.1"

_GroupT = TypeVar("_GroupT", covariant=True)


class GroupClass(Protocol[_GroupT]):
    """worker.parallel.gloo.GlooGroup, and others that connect as it does."""

    def __call__(
        self, name: str, store: Store, rank: int, size: int, /, *,
        host: str, connect_timeout: float, call_timeout: float,
    ) -> _GroupT: ...  # fmt: skip


def meet(
    address: str,
    axes: Axes,
    rank: int,
    replica: int = 0,
    *,
    host: str = LOOPBACK,
    tensor_group: GroupClass[Group] = GlooGroup,
    call_timeout: float,
    while_waiting: Callable[[], None],
) -> Groups:
    """Connects with the other ranks of each group that this one is in, once all of axes.num_ranks are there.

    address: of step_pb2.Reset. rank: within its replica. replica: its number; it matters to those that compute their
    steps together. host: the address of this machine that ranks talk over. tensor_group: what connects those that share
    each layer. call_timeout: seconds that each of the groups' calls may take. while_waiting: called again and again
    until all are there, which may take as long as loading weights; may raise. Raises PlanError for another kind of
    address, CollectiveError if ranks vanish while they connect, RuntimeError if the place where they meet does.
    """
    store = _store(address, axes)
    global_rank = axes.global_rank(rank, replica if axes.data_size > 1 else 0)
    _wait_for_all(store, axes, global_rank, while_waiting)

    def connect(group: GroupClass[_GroupT], kind: str, members: Sequence[int]) -> _GroupT:
        """members: global ranks."""
        name = f"{kind} of ranks {', '.join(map(str, members))}"
        return group(
            name, PrefixStore(name, store), members.index(global_rank), len(members),
            host=host, connect_timeout=_CONNECT_S, call_timeout=call_timeout,
        )  # fmt: skip

    first = global_rank - rank
    # All ranks connect their groups in this order, so that none waits for one that waits elsewhere.
    tensor, pipeline, data = Alone(), None, Alone()
    if axes.tensor_size > 1:
        tensor = connect(tensor_group, "tensor group", [first + each for each in axes.tensor_group(rank)])
    if axes.pipeline_size > 1:
        pipeline = connect(GlooPipeline, "pipeline", [first + each for each in axes.pipeline_group(rank)])
    experts = tensor
    if axes.data_size > 1:
        data = connect(GlooGroup, "data group", axes.data_group(rank))
        experts = connect(GlooGroup, "expert group", axes.expert_group(rank))
    return Groups(tensor=tensor, pipeline=pipeline, data=data, experts=experts)


def _store(address: str, axes: Axes) -> Store:
    """Where ranks leave word for each other."""
    kind, _, place = address.partition(":")
    if kind == "tcp":
        return store_at(place)
    if kind != "file" or not place:
        raise PlanError(f"rendezvous: {address!r} is neither file:PATH nor tcp:HOST:PORT/EPOCH")
    return FileStore(place, axes.num_ranks)


def _wait_for_all(store: Store, axes: Axes, global_rank: int, while_waiting: Callable[[], None]) -> None:
    store.set(_name(global_rank), "here")
    everybody = [_name(each) for each in range(axes.num_ranks)]
    while not store.check(everybody):
        while_waiting()
        time.sleep(_PAUSE_S)


def _name(global_rank: int) -> str:
    return f"rank {global_rank}"
