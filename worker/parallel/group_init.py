"""Connects the ranks of an epoch, on one machine or on several."""

import concurrent.futures
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from configs.options import Options
from worker.errors import CollectiveError, PermanentError, PlanError
from worker.parallel.axes import Axes
from worker.parallel.gloo import GlooGroup, GlooPipeline
from worker.parallel.groups import Alone, Group, Groups
from worker.parallel.nccl import tensor_group_class

# A store that is there answers in milliseconds.
_TIMEOUT_S = 10.0
# Names of machines that have just been started may be known a little later.
_NAME_PAUSE_S, _LONGEST_NAME_WAIT_S = 0.5, 60.0


def host_towards(endpoint: str, while_waiting: Callable[[], None]) -> str:
    """The address of this machine from which it reaches another: loopback for itself, so that it is one that the other
    machines of the cluster know, too.

    endpoint: tcp://HOST:PORT. while_waiting: called again and again while the host's name is not known; may raise.
    Raises OSError if it is not after a minute, or if there is no route.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    gives_up_at = time.monotonic() + _LONGEST_NAME_WAIT_S
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror as error:
            if time.monotonic() >= gives_up_at:
                raise OSError(f"{host}: {error.strerror}; give worker_host, or a name that is known") from None
        while_waiting()
        time.sleep(_NAME_PAUSE_S)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Chooses a route; nothing is sent.
        probe.connect(address)
        return probe.getsockname()[0]


def hold_store(host: str) -> tuple[Store, str]:
    """A store that listens at a free port of one address of this machine, as long as it is referred to; and where:
    HOST:PORT, for step_pb2.Hello. Raises PermanentError."""
    try:
        # TCPStore's own binding takes all addresses.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise PermanentError(
            f"worker_host={host!r}: cannot listen there ({error.strerror}); give an address of this machine"
        ) from None
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return store, f"{_bracketed(host)}:{port}"


def store_at(place: str) -> Store:
    """What ranks of one epoch share of the store at HOST:PORT/EPOCH. May block for ever, if the machine has vanished or
    the process is stopped: see worker.parallel.group_init. Raises PlanError, or RuntimeError
    if the store is not there."""
    address, _, epoch = place.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and epoch):
        raise PlanError(f"rendezvous: {place!r} is not of the form HOST:PORT/EPOCH")
    host = host.strip("[]")
    try:
        # TCPStore says the same in fifty lines, and tries for longer.
        socket.create_connection((host, int(port)), _TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None
    store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))
    return PrefixStore(epoch, store)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# Between looks at who has come.
_STORE_PAUSE_S = 0.02
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


def connect_ranks(
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
        time.sleep(_STORE_PAUSE_S)


def _name(global_rank: int) -> str:
    return f"rank {global_rank}"


_T = TypeVar("_T")

# Between looks at whether somebody still wants the result.
_CALL_PAUSE_S = 0.02


class _NobodyWaits(Exception):
    """Ends a call whose result is not wanted any more."""


def call_with_timeout(call: Callable[[Callable[[], None]], _T], while_waiting: Callable[[], None]) -> _T:
    """What `call`, on a thread of its own, returns or raises; while_waiting is called here meanwhile, again and again.

    If while_waiting raises, that is raised at once, and the thread is left behind: it ends when its call does, which
    may be as late as the process. The call is given a function to call in loops of its own; it raises once nobody
    waits.
    """
    is_left = threading.Event()
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def check() -> None:
        if is_left.is_set():
            raise _NobodyWaits

    def run() -> None:
        try:
            outcome.set_result(call(check))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="patiently", daemon=True).start()
    try:
        while not concurrent.futures.wait([outcome], _CALL_PAUSE_S).done:
            while_waiting()
    except BaseException:
        is_left.set()
        raise
    return outcome.result()


class GroupInit:
    """Of one process. store_address: for its Hello, empty if the ranks' store is not here.

    A store on another machine may fall silent in the middle of a call: if that machine vanishes, or the process is
    stopped. So what may wait for it is left to a thread that can be left behind.
    """

    def __init__(
        self, options: Options, axes: Axes, replica: int, rank: int, while_waiting: Callable[[], None]
    ) -> None:
        """while_waiting: as worker.parallel.group_init.host_towards. Raises PermanentError."""
        self._options, self._axes, self._replica, self._rank = options, axes, replica, rank
        self._is_patient = options.meets_over_tcp(replica)
        self._host, self.store_address = LOOPBACK, ""
        if self._is_patient:
            try:
                self._host = options.worker_host or host_towards(options.step_address(replica), while_waiting)
            except OSError as error:
                raise PermanentError(f"step_addresses: no way to {options.step_address(replica)}: {error}") from error
            if axes.global_rank(rank, replica if axes.data_size > 1 else 0) == 0:
                self._store, self.store_address = hold_store(self._host)

    def __call__(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        """As connect_ranks, without the RuntimeError."""
        if self._is_patient:
            return call_with_timeout(lambda check: self._meet_at_store(address, check), while_waiting)
        return self._meet(address, while_waiting)

    def _meet_at_store(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        try:
            return self._meet(address, while_waiting)
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise CollectiveError(f"the ranks' store at {address} is not there any more: {cause}") from error

    def _meet(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        return connect_ranks(
            address,
            self._axes,
            self._rank,
            self._replica,
            host=self._host,
            # Once it has been decided which device this process computes on.
            tensor_group=tensor_group_class(self._options, self._replica, self._rank),
            call_timeout=self._options.step_timeout,
            while_waiting=while_waiting,
        )
