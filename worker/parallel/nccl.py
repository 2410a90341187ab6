"""Groups of ranks on GPUs, connected by NCCL.

What is known of torch's ProcessGroupNCCL (2.11 to 2.13) and of NCCL, from their sources, and shapes this file:

- A call that is not asynchronous puts NCCL's kernel on the current stream and gives no Work: it can be captured.
- A communicator can be given up only when no graph holds calls of it any more (ncclCommAbort waits for that).
  Who captures drops the graphs before `leave`; one that is being replayed may be dropped, too.
- torch's watchdog sees no replay of a graph, waits a minute before it aborts, and by default ends the process. With
  TORCH_NCCL_BLOCKING_WAIT it does not run: a step that hangs, for a rank that has died, is given up by the scheduler
  (step_timeout), which tells all ranks to leave.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, Store

from configs.options import Options
from worker.device.select import gpu_index
from worker.errors import CollectiveError
from worker.parallel.gloo import GlooGroup, first_line


class NcclGroup:
    """worker.parallel.groups.Group, of CUDA tensors, on the current stream: nothing here waits for the GPU. Traffic is
    not encrypted."""

    def __init__(
        self,
        name: str,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        batch_invariant: bool,
        host: str,
        connect_timeout: float,
        call_timeout: float,
    ) -> None:
        """As worker.parallel.gloo.GlooGroup. device: this rank's GPU, that of no other rank. batch_invariant: sums have
        the same bits wherever in a tensor a number lies. host: of no use here, for NCCL chooses among a machine's
        addresses itself (NCCL_SOCKET_IFNAME). call_timeout: seconds that `leave` may take. Raises CollectiveError."""
        self.rank, self.size, self._name = rank, size, name
        # At two ranks there is one order.
        self._sums_in_order = batch_invariant and size > 2
        # As in GlooGroup, but of what a graph captured once, however often it is replayed.
        self.num_calls = self.num_bytes = 0
        self.step = 0
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        store.set_timeout(timedelta(seconds=connect_timeout))
        try:
            # The thread may be one whose GPU is another.
            with torch.cuda.device(device):
                self._group: Any = _process_group(store, rank, size, timedelta(seconds=call_timeout))
                # At once, not with the first call: all ranks are here now.
                self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {rank} of {name} cannot connect with the others: {first_line(error)}"
            ) from error

    def sum_(self, x: torch.Tensor) -> None:
        """In x's dtype: of bfloat16, each addition is rounded. In order, it is float32 that is added up, and rounded
        once."""
        assert x.is_contiguous()
        if self._sums_in_order:
            parts = self.gather(x)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            x.copy_(total)
            return
        options = AllreduceOptions()
        options.asyncOp = False
        # As a ring sends it; what NCCL chooses may send less.
        self.num_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        self._call(f"a sum of {x.nbytes} bytes", lambda group: group.allreduce([x], options))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        self.num_bytes += x.nbytes * (self.size - 1)
        self._call(
            f"a gather of {x.nbytes} bytes",
            lambda group: group._allgather_base(gathered.flatten(0, 1), x.contiguous(), options),
        )
        return gathered

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        assert x.is_contiguous()
        arrived = x.new_empty((sum(received), *x.shape[1:]))
        num_bytes = (sum(sent) - sent[self.rank]) * x[:1].nbytes if len(x) else 0
        options = AllToAllOptions()
        options.asyncOp = False
        self.num_bytes += num_bytes
        self._call(
            f"an exchange of {num_bytes} bytes",
            lambda group: group.alltoall_base(arrived, x, [*received], [*sent], options),
        )
        return arrived

    def leave(self) -> None:
        """Frees this rank's GPU from calls that wait for others; others, that wait for this one, leave likewise. No
        graph may hold a call any more. Raises RuntimeError if that takes longer than call_timeout."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _call(self, what: str, begin: Callable[[Any], object]) -> None:
        self.num_calls += 1
        if self._group is None:
            raise CollectiveError(f"{self._name}: {what} in step {self.step}: rank {self.rank} has left")
        try:
            begin(self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"{self._name}: {what} in step {self.step} failed at rank {self.rank}: {first_line(error)}"
            ) from error


def _process_group(store: Store, rank: int, size: int, timeout: timedelta) -> object:
    # Not in every build of torch.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def tensor_group_class(options: Options, replica: int, rank: int) -> Callable[..., GlooGroup | NcclGroup]:
    """What connects the ranks that share each layer: NCCL, if this process computes on a GPU, which it has begun to."""
    if not torch.cuda.is_initialized():
        return GlooGroup
    device = torch.device("cuda", gpu_index(options, torch.cuda.device_count(), replica, rank))
    return partial(NcclGroup, device=device, batch_invariant=options.batch_invariant)
