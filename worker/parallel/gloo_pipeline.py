"""Stages on CPUs, connected by gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from worker.errors import CollectiveError
from worker.parallel.gloo import connect, first_line

_NUM_CHANNELS = 2
# gloo's tags have 31 bits. No two steps that are under way at once have the same one.
_NUM_TAGS = 2**30


class GlooPipeline:
    """worker.parallel.pipeline.PipelineLink. Traffic is not encrypted."""

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
        """As worker.parallel.gloo.GlooGroup."""
        self.stage, self.num_stages, self.step, self._name = stage, num_stages, 0, name
        # What this rank has sent so far.
        self.num_calls = self.num_bytes = 0
        self._group: Any = connect(
            name, store, stage, num_stages, host=host, connect_timeout=connect_timeout, call_timeout=call_timeout
        )
        # Begun and not waited for. One thread may leave while another begins or waits.
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
            # Connections close when nothing refers to the group or to one of its transfers any more.
            self._group = None
            for transfer in self._transfers:
                transfer.release()
            self._transfers.clear()

    def finish(self, transfer: "GlooTransfer") -> None:
        """To be called once it has been waited for."""
        with self._lock:
            self._transfers.discard(transfer)

    def _begin(self, what: str, tensor: torch.Tensor, begin: Callable[[Any], Any]) -> "GlooTransfer":
        with self._lock, _as_collective_error(what):
            if self._group is None:
                raise CollectiveError(f"{what}: this one has left")
            transfer = GlooTransfer(self, what, tensor, begin(self._group))
            self._transfers.add(transfer)
        return transfer


class GlooTransfer:
    """worker.parallel.pipeline.Transfer."""

    def __init__(self, pipeline: GlooPipeline, what: str, tensor: torch.Tensor, work: Any) -> None:
        # gloo reads or writes the tensor's memory until the work is done.
        self._pipeline, self._what, self._tensor, self._work = pipeline, what, tensor, work

    def wait(self) -> None:
        try:
            with _as_collective_error(self._what):
                # No variable holds it: the frames of an exception would keep the connection open.
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
            raise CollectiveError(f"{self._what}: this one has left")
        return work


@contextmanager
def _as_collective_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what} failed, for that one has died or hangs: {first_line(error)}") from error


def _tag(step: int, channel: int) -> int:
    return (step * _NUM_CHANNELS + channel) % _NUM_TAGS
