"""The ranks that a rank computes its steps with: tensor, expert and data groups, and the pipeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.parallel.axes import Axes


class Group(Protocol):
    """Every rank of it makes the same calls in the same order, with tensors of the same shape and dtype."""

    rank: int
    size: int
    # Under way, for messages.
    step: int

    def sum_(self, x: torch.Tensor) -> None:
        """Replaces x, contiguous, by the sum over all ranks: added up from rank 0 on, so that it has the same bits on
        each and whatever else is in the tensor. (In a ring's sum the order depends on the position.)"""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], contiguous: what each rank gave."""
        ...

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """To each rank rows of x [sum(sent), ...], in the order of ranks; what each rank has sent to this one,
        [sum(received), ...], in the same order. sent, received: rows for and from each rank; the numbers of both ends
        are equal. The one call whose shapes differ between ranks."""
        ...

    def leave(self) -> None:
        """Calls of other ranks fail if they wait for this one, and so do later ones here."""
        ...


class Alone:
    """A group of one."""

    rank, size, step = 0, 1, 0

    def sum_(self, x: torch.Tensor) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x

    def leave(self) -> None:
        pass


class Rehearsal:
    """A rank of a group without the others: for a warm-up, whose results mean nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.step = rank, size, 0

    def sum_(self, x: torch.Tensor) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape).contiguous()

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x.new_zeros((sum(received), *x.shape[1:]))

    def leave(self) -> None:
        pass


def alone_or_rehearsal(rank: int, size: int) -> Group:
    """Until the ranks are connected."""
    return Alone() if size == 1 else Rehearsal(rank, size)


class Transfer(Protocol):
    """Of a tensor, from one stage to another. The tensor is in use until `wait` has returned."""

    def wait(self) -> None:
        """Until it has been sent, or has come. Raises CollectiveError."""
        ...


class PipelineLink(Protocol):
    """Between the ranks of one place in all stages. A sender and a receiver name the same step and channel, once each;
    in which order they begin and finish their transfers is open. Calls come from several threads."""

    stage: int
    num_stages: int
    # Begun last, for messages.
    step: int

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to send x, contiguous. channel: 0 or 1. Raises CollectiveError."""
        ...

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to receive a tensor of into's size. Raises CollectiveError."""
        ...

    def leave(self) -> None:
        """Transfers that are under way here and at the other stages fail, and so do later ones."""
        ...


class _Done:
    def wait(self) -> None:
        pass


class RehearsedPipeline:
    """A stage without the others: for a warm-up, whose results mean nothing."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage, self.num_stages, self.step = stage, num_stages, 0

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        return _Done()

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        into.zero_()
        return _Done()

    def leave(self) -> None:
        pass


_ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Of one epoch. By default there is nobody else."""

    # That share each layer.
    tensor: Group = _ALONE
    # The other stages; None if there is one stage.
    pipeline: PipelineLink | None = None
    # The same place in replicas that compute their steps together.
    data: Group = _ALONE
    # The same stage in all of these replicas: experts are dealt out over it. The tensor group itself, if there is one
    # replica.
    experts: Group = _ALONE

    def begin_step(self, step: int) -> None:
        """For messages."""
        for each in self._all:
            each.step = step

    def leave(self) -> None:
        """The other ranks fail if they wait for this one, now or later."""
        for each in self._all:
            each.leave()

    @property
    def _all(self) -> Iterator[Group | PipelineLink]:
        yield from (self.tensor, self.data, self.experts)
        if self.pipeline is not None:
            yield self.pipeline


def without_others(axes: Axes, rank: int, replica: int = 0) -> Groups:
    """Until the ranks are connected. rank: within its replica."""
    tensor = alone_or_rehearsal(axes.tensor_rank(rank), axes.tensor_size)
    data, experts = _ALONE, tensor
    if axes.data_size > 1:
        data = alone_or_rehearsal(replica, axes.data_size)
        members = axes.expert_group(rank)
        experts = alone_or_rehearsal(members.index(axes.global_rank(rank, replica)), len(members))
    pipeline = RehearsedPipeline(axes.stage(rank), axes.pipeline_size) if axes.pipeline_size > 1 else None
    return Groups(tensor=tensor, pipeline=pipeline, data=data, experts=experts)
