"""Groups of ranks on CPUs, connected by gloo."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from worker.errors import CollectiveError


class GlooGroup:
    """worker.parallel.group.Group. Traffic is not encrypted."""

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
        """Connects with the other ranks, all of which do so with the same store at about the same time. name: for
        messages, such as "tensor group of ranks 0, 1". host: the address of this machine that ranks talk over. Timeouts
        in seconds. Raises CollectiveError."""
        self.rank, self.size, self._name = rank, size, name
        # Of this group so far: calls, and bytes that this rank has sent to others.
        self.num_calls = self.num_bytes = 0
        # The step under way, for messages.
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
        # Connections close when nothing refers to it any more.
        self._group = None

    def _call(self, what: str, begin: Callable[[Any], Any]) -> None:
        self.num_calls += 1
        try:
            # No variable holds it: the frames of an exception would keep the connections open.
            begin(self._connected(what)).wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"{self._name}: {what} in step {self.step} failed at rank {self.rank}, for another rank has died or "
                f"hangs: {first_line(error)}"
            ) from error

    def _connected(self, what: str) -> Any:
        group = self._group
        if group is None:
            raise CollectiveError(f"{self._name}: {what} in step {self.step}: rank {self.rank} has left")
        return group


def connect(
    name: str, store: Store, rank: int, size: int, *, host: str, connect_timeout: float, call_timeout: float
) -> ProcessGroupGloo:
    """See `GlooGroup`."""
    # Not by init_process_group, of which there is one a process: groups come and go with epochs. Without a device,
    # gloo asks the system which address the host's name has. torch's stubs know neither options nor calls.
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
