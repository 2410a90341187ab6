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

# A live store answers in milliseconds.
_TIMEOUT_S = 10.0
# The name of a machine that has just started may take a while to resolve.
_NAME_PAUSE_S, _LONGEST_NAME_WAIT_S = 0.5, 60.0


def host_towards(endpoint: str, while_waiting: Callable[[], None]) -> str:
    """Returns the local address from which this machine reaches the endpoint. Other machines of the cluster can reach
    it, too; it is loopback only if the endpoint is.

    endpoint: tcp://HOST:PORT. while_waiting: called repeatedly while the host's name does not resolve; may raise.
    Raises OSError if it does not within a minute, or if there is no route.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    gives_up_at = time.monotonic() + _LONGEST_NAME_WAIT_S
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror as error:
            if time.monotonic() >= gives_up_at:
                raise OSError(f"{host}: {error.strerror}; set worker_host, or use a name that resolves") from None
        while_waiting()
        time.sleep(_NAME_PAUSE_S)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This chooses a route and sends nothing.
        probe.connect(address)
        return probe.getsockname()[0]


def hold_store(host: str) -> tuple[Store, str]:
    """Returns a store that listens at a free port of `host`, an address of this machine, for as long as it is
    referenced; and its HOST:PORT, for step_pb2.Hello. Raises PermanentError."""
    try:
        # TCPStore itself would bind all addresses.
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
    """Returns the part of a store that belongs to one epoch. place: HOST:PORT/EPOCH. May block for ever, if the store's
    machine has vanished or its process is stopped: see GroupInit. Raises PlanError for another form, RuntimeError if
    the store is not there."""
    address, _, epoch = place.rpartition("/")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and epoch):
        raise PlanError(f"rendezvous: {place!r} is not of the form HOST:PORT/EPOCH")
    host = host.strip("[]")
    try:
        # TCPStore would try for longer and fail with fifty lines.
        socket.create_connection((host, int(port)), _TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None
    store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S))
    return PrefixStore(epoch, store)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# The pause between checks of which ranks have come.
_STORE_PAUSE_S = 0.02
# Connecting takes milliseconds once all ranks have come.
_CONNECT_S = 10.0
# Ranks on one machine connect over it.
LOOPBACK = "127.0.0.1"

_GroupT = TypeVar("_GroupT", covariant=True)


class GroupClass(Protocol[_GroupT]):
    """worker.parallel.gloo.GlooGroup, and other classes with the same constructor."""

    def __call__(
        self,
        name: str,
        store: Store,
        rank: int,
        size: int,
        /,
        *,
        host: str,
        connect_timeout: float,
        call_timeout: float,
    ) -> _GroupT: ...


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
    """Connects this rank with the others in each of its groups, once all axes.num_ranks ranks are there.

    address: that of step_pb2.Reset. rank: within its replica. replica: its number; used only by replicas that compute
    their steps together. host: the address of this machine that other ranks connect to. tensor_group: connects the
    ranks that share each layer. call_timeout: seconds that each call of a group may take. while_waiting: called
    repeatedly until all ranks are there, which may take as long as loading weights; may raise. Raises PlanError for
    another kind of address, CollectiveError if ranks vanish while they connect, RuntimeError if the store vanishes.
    """
    store = _store(address, axes)
    global_rank = axes.global_rank(rank, replica if axes.data_size > 1 else 0)
    _wait_for_all(store, axes, global_rank, while_waiting)

    def connect(group: GroupClass[_GroupT], kind: str, members: Sequence[int]) -> _GroupT:
        """members: global ranks."""
        name = f"{kind} of ranks {', '.join(map(str, members))}"
        return group(
            name,
            PrefixStore(name, store),
            members.index(global_rank),
            len(members),
            host=host,
            connect_timeout=_CONNECT_S,
            call_timeout=call_timeout,
        )

    first = global_rank - rank
    # All ranks connect their groups in this order, so that they do not deadlock.
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
    """Returns the store at which the ranks meet."""
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

# The pause between calls of while_waiting.
_CALL_PAUSE_S = 0.02


class _NobodyWaits(Exception):
    """Ends a call whose result is no longer wanted."""


def call_with_timeout(call: Callable[[Callable[[], None]], _T], while_waiting: Callable[[], None]) -> _T:
    """Runs `call` on a thread of its own, and returns or raises what it does; meanwhile calls while_waiting repeatedly.

    If while_waiting raises, that error is raised at once and the thread is abandoned: it ends when `call` does, at the
    latest with the process. `call` gets a function to call in its own loops; it raises once nothing waits for the
    result.
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
    """Connects one process with the other ranks, once per epoch. store_address: for its Hello; empty if another process
    has the ranks' store.

    A store on another machine may stop answering in the middle of a call, if that machine vanishes or the process is
    stopped. So calls that may wait for it run on a thread that can be abandoned.
    """

    def __init__(
        self, options: Options, axes: Axes, replica: int, rank: int, while_waiting: Callable[[], None]
    ) -> None:
        """while_waiting: as for host_towards. Raises PermanentError."""
        self._options, self._axes, self._replica, self._rank = options, axes, replica, rank
        self._is_patient = options.meets_over_tcp(replica)
        self._host, self.store_address = LOOPBACK, ""
        if self._is_patient:
            try:
                self._host = options.worker_host or host_towards(options.step_address(replica), while_waiting)
            except OSError as error:
                raise PermanentError(
                    f"step_addresses: cannot reach {options.step_address(replica)}: {error}"
                ) from error
            if axes.global_rank(rank, replica if axes.data_size > 1 else 0) == 0:
                self._store, self.store_address = hold_store(self._host)

    def __call__(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        """Connects the ranks as connect_ranks does, but raises CollectiveError in place of RuntimeError."""
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
            # Called only now: which device this process computes on must be decided first.
            tensor_group=tensor_group_class(self._options, self._replica, self._rank),
            call_timeout=self._options.step_timeout,
            while_waiting=while_waiting,
        )
