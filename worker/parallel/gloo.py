"""Groups and pipeline stages on CPUs, connected by gloo."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from worker.errors import CollectiveError


class GlooGroup:
    """worker.parallel.groups.Group. Traffic is not encrypted."""

    def __init__(
        self,
        name: str,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        connect_timeout: float,
        call_timeout: float,
    ) -> None:
        """Connects with the other ranks, which must connect through the same store at about the same time. name: for
        messages, such as "tensor group of ranks 0, 1". host: the address of this machine that other ranks connect to.
        Timeouts in seconds. Raises CollectiveError."""
        self.rank, self.size, self._name = rank, size, name
        # This group's calls so far, and the bytes that this rank has sent to others.
        self.num_calls = self.num_bytes = 0
        # The current step, for messages.
        self.step = 0
        self._group: Any = connect(
            name, store, rank, size, host=host, connect_timeout=connect_timeout, call_timeout=call_timeout
        )

    def sum_(self, x: torch.Tensor) -> None:
        parts = self.gather(x)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x += part

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        self.num_bytes += x.nbytes * (self.size - 1)
        self._call(f"a gather of {x.nbytes} bytes", lambda group: group.allgather([[*gathered]], [x.contiguous()]))
        return gathered

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous()
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        num_bytes = (sum(sent) - sent[self.rank]) * x[:1].nbytes if len(x) else 0
        self.num_bytes += num_bytes
        self._call(
            f"an exchange of {num_bytes} bytes", lambda group: group.alltoall_base(arrived, x, [*received], [*sent])
        )
        return arrived

    def leave(self) -> None:
        # Connections close when nothing refers to the group any more.
        self._group = None

    def _call(self, what: str, begin: Callable[[Any], Any]) -> None:
        self.num_calls += 1
        try:
            # No variable holds the group: an exception's frames would keep its connections open.
            begin(self._connected(what)).wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"{self._name}: {what} in step {self.step} failed at rank {self.rank}: another rank has died or hangs: "
                f"{first_line(error)}"
            ) from error

    def _connected(self, what: str) -> Any:
        group = self._group
        if group is None:
            raise CollectiveError(f"{self._name}: {what} in step {self.step}: rank {self.rank} has left")
        return group


def connect(
    name: str, store: Store, rank: int, size: int, *, host: str, connect_timeout: float, call_timeout: float
) -> ProcessGroupGloo:
    """Connects the ranks of a group or pipeline; see `GlooGroup`."""
    # Not by init_process_group, which makes one group per process: these come and go with epochs. Without a device,
    # gloo would resolve the host's own name. torch's stubs know neither options nor calls.
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=call_timeout)
    store.set_timeout(timedelta(seconds=connect_timeout))
    try:
        return ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} of {name} cannot connect with the others: {first_line(error)}") from error


def first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


_NUM_CHANNELS = 2
# gloo's tags have 31 bits. Tags repeat, but never among the steps in flight.
_NUM_TAGS = 2**30


class GlooPipeline:
    """worker.parallel.groups.PipelineLink. Traffic is not encrypted."""

    def __init__(
        self,
        name: str,
        store: Store,
        stage: int,
        num_stages: int,
        *,
        host: str,
        connect_timeout: float,
        call_timeout: float,
    ) -> None:
        """Connects with the other stages; arguments as for GlooGroup."""
        self.stage, self.num_stages, self.step, self._name = stage, num_stages, 0, name
        # Sends and bytes of this rank so far.
        self.num_calls = self.num_bytes = 0
        self._group: Any = connect(
            name, store, stage, num_stages, host=host, connect_timeout=connect_timeout, call_timeout=call_timeout
        )
        # Transfers that have begun and not been waited for. One thread may leave while another begins or waits.
        self._transfers: set[GlooTransfer] = set()
        self._lock = Lock()

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> "GlooTransfer":
        assert x.is_contiguous()
        self.num_calls += 1
        self.num_bytes += x.nbytes
        what = f"{self._name}: sending {x.nbytes} bytes of step {step} to stage {stage} at stage {self.stage}"
        return self._begin(what, x, lambda group: group.send([x], stage, _tag(step, channel)))

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> "GlooTransfer":
        assert into.is_contiguous()
        what = f"{self._name}: receiving {into.nbytes} bytes of step {step} from stage {stage} at stage {self.stage}"
        return self._begin(what, into, lambda group: group.recv([into], stage, _tag(step, channel)))

    def leave(self) -> None:
        with self._lock:
            # Connections close when nothing refers to the group or its transfers any more.
            self._group = None
            for transfer in self._transfers:
                transfer.release()
            self._transfers.clear()

    def finish(self, transfer: "GlooTransfer") -> None:
        """Forgets a transfer that has been waited for."""
        with self._lock:
            self._transfers.discard(transfer)

    def _begin(self, what: str, tensor: torch.Tensor, begin: Callable[[Any], Any]) -> "GlooTransfer":
        with self._lock, _as_collective_error(what):
            if self._group is None:
                raise CollectiveError(f"{what}: this stage has left")
            transfer = GlooTransfer(self, what, tensor, begin(self._group))
            self._transfers.add(transfer)
        return transfer


class GlooTransfer:
    """worker.parallel.groups.Transfer."""

    def __init__(self, pipeline: GlooPipeline, what: str, tensor: torch.Tensor, work: Any) -> None:
        # gloo reads or writes the tensor's memory until the work is done.
        self._pipeline, self._what, self._tensor, self._work = pipeline, what, tensor, work

    def wait(self) -> None:
        try:
            with _as_collective_error(self._what):
                # No variable holds the work: an exception's frames would keep the connection open.
                self._unfinished.wait()
        finally:
            self.release()
            self._pipeline.finish(self)

    def release(self) -> None:
        self._work = None

    @property
    def _unfinished(self) -> Any:
        work = self._work
        if work is None:
            raise CollectiveError(f"{self._what}: this stage has left")
        return work


@contextmanager
def _as_collective_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what} failed: the other stage has died or hangs: {first_line(error)}") from error


def _tag(step: int, channel: int) -> int:
    return (step * _NUM_CHANNELS + channel) % _NUM_TAGS
