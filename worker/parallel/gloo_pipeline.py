"""Stages on CPUs, connected by gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> "GlooTransfer":
        assert x.is_contiguous()
        self.num_calls += 1
        self.num_bytes += x.nbytes
        what = f"{self._name}: sending {x.nbytes} bytes of step {step} to stage {stage}"
        return self._begin(what, x, lambda group: group.send([x], stage, _tag(step, channel)))

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> "GlooTransfer":
        assert into.is_contiguous()
        what = f"{self._name}: receiving {into.nbytes} bytes of step {step} from stage {stage}"
        return self._begin(what, into, lambda group: group.recv([into], stage, _tag(step, channel)))

    def leave(self) -> None:
        # Connections close when nothing refers to it or to one of its transfers any more.
        self._group = None

    def _begin(self, what: str, tensor: torch.Tensor, begin: Callable[[Any], Any]) -> "GlooTransfer":
        group = self._group
        if group is None:
            raise CollectiveError(f"{what}: stage {self.stage} has left")
        with _as_collective_error(what):
            return GlooTransfer(what, tensor, begin(group))


class GlooTransfer:
    """worker.parallel.pipeline.Transfer."""

    def __init__(self, what: str, tensor: torch.Tensor, work: Any) -> None:
        # gloo reads or writes the tensor's memory until the work is done.
        self._what, self._tensor, self._work = what, tensor, work

    def wait(self) -> None:
        with _as_collective_error(self._what):
            self._work.wait()


@contextmanager
def _as_collective_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what} failed, for that rank has died or hangs: {first_line(error)}") from error


def _tag(step: int, channel: int) -> int:
    return (step * _NUM_CHANNELS + channel) % _NUM_TAGS
