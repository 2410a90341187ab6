"""Groups of ranks on GPUs, connected by NCCL.

Facts about torch's ProcessGroupNCCL (2.11 to 2.13) and NCCL, from their sources, that shape this file:

- A synchronous call puts NCCL's kernel on the current stream and returns no Work, so it can be captured.
- A communicator can be aborted only when no graph holds calls of it any more (ncclCommAbort waits for that). So the
  owner of the graphs drops them before `leave`; it may drop one that is being replayed, too.
- torch's watchdog does not see replays of graphs, waits a minute before it aborts, and by default ends the process.
  With TORCH_NCCL_BLOCKING_WAIT it does not run: if a step hangs because a rank has died, the scheduler gives up on it
  (step_timeout) and tells all ranks to leave.
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
    """worker.parallel.groups.Group for CUDA tensors, on the current stream: no call waits for the GPU. Traffic is not
    encrypted."""

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
        """Connects as worker.parallel.gloo.GlooGroup does. device: this rank's GPU, shared with no other rank.
        batch_invariant: a sum's bits do not depend on the position in the tensor. host: not used, because NCCL itself
        chooses among a machine's addresses (NCCL_SOCKET_IFNAME). call_timeout: seconds that `leave` may take. Raises
        CollectiveError."""
        self.rank, self.size, self._name = rank, size, name
        # With two ranks, every order gives the same sum.
        self._sums_in_order = batch_invariant and size > 2
        # As in GlooGroup, but calls in a graph count once, when they are captured, not at each replay.
        self.num_calls = self.num_bytes = 0
        self.step = 0
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        store.set_timeout(timedelta(seconds=connect_timeout))
        try:
            # This thread's current GPU may be another one.
            with torch.cuda.device(device):
                self._group: Any = _process_group(store, rank, size, timedelta(seconds=call_timeout))
                # Connect now rather than at the first call: all ranks are here.
                self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {rank} of {name} cannot connect with the others: {first_line(error)}"
            ) from error

    def sum_(self, x: torch.Tensor) -> None:
        """NCCL adds in x's dtype: in bfloat16, each addition is rounded. Sums in order are added in float32 and rounded
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
        # Bytes that a ring sends; the algorithm that NCCL chooses may send less.
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
        """Frees this rank's GPU from calls that wait for others; ranks that wait for this one must leave, too. No graph
        may hold a call any more. Raises RuntimeError if it takes longer than call_timeout."""
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
    # Imported here because not every build of torch has it.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def tensor_group_class(options: Options, replica: int, rank: int) -> Callable[..., GlooGroup | NcclGroup]:
    """Returns the class that connects the ranks that share each layer: NCCL if this process has initialized CUDA."""
    if not torch.cuda.is_initialized():
        return GlooGroup
    device = torch.device("cuda", gpu_index(options, torch.cuda.device_count(), replica, rank))
    return partial(NcclGroup, device=device, batch_invariant=options.batch_invariant)
