"""How a rank finds the others, epoch after epoch, on one machine or on several."""

from collections.abc import Callable

from configs.options import Options
from worker.errors import CollectiveError, PermanentError
from worker.parallel.axes import Axes
from worker.parallel.groups import Groups
from worker.parallel.nccl import tensor_group_class
from worker.parallel.patience import patiently
from worker.parallel.rendezvous import LOOPBACK, meet
from worker.parallel.tcp_store import hold_store, host_towards


class Meeting:
    """Of one process. store_address: for its Hello, empty if the ranks' store is not here.

    A store on another machine may fall silent in the middle of a call: if that machine vanishes, or the process is
    stopped. So what may wait for it is left to a thread that can be left behind.
    """

    def __init__(
        self, options: Options, axes: Axes, replica: int, rank: int, while_waiting: Callable[[], None]
    ) -> None:
        """while_waiting: as worker.parallel.tcp_store.host_towards. Raises PermanentError."""
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
        """As worker.parallel.rendezvous.meet, without the RuntimeError."""
        if self._is_patient:
            return patiently(lambda check: self._meet_at_store(address, check), while_waiting)
        return self._meet(address, while_waiting)

    def _meet_at_store(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        try:
            return self._meet(address, while_waiting)
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise CollectiveError(f"the ranks' store at {address} is not there any more: {cause}") from error

    def _meet(self, address: str, while_waiting: Callable[[], None]) -> Groups:
        return meet(
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
