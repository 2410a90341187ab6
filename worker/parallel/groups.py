"""The ranks that a rank computes its steps with: tensor, expert and data groups, and the pipeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.parallel.axes import Axes


class Group(Protocol):
    """Ranks that compute together. All make the same calls in the same order, with tensors of the same shape and
    dtype."""

    rank: int
    size: int
    # The current step, for error messages.
    step: int

    def sum_(self, x: torch.Tensor) -> None:
        """Replaces x, contiguous, by the sum over all ranks. Terms are added from rank 0 on, so that the bits are the
        same on each rank and at each position of the tensor. (In a ring's sum the order depends on the position.)"""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [size, *x.shape], contiguous: the x of each rank."""
        ...

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends rows of x [sum(sent), ...] to each rank, in the order of ranks, and returns what each rank has sent to
        this one, [sum(received), ...], in the same order. sent, received: numbers of rows for and from each rank; a
        sender's and its receiver's must agree. This is the only call whose shapes differ between ranks."""
        ...

    def leave(self) -> None:
        """Makes calls of other ranks that wait for this one fail, and later calls here, too."""
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
    """A group that pretends to have other ranks: for a warm-up, whose results are not used."""

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
    """Returns a group to use until the ranks are connected."""
    return Alone() if size == 1 else Rehearsal(rank, size)


class Transfer(Protocol):
    """A transfer of a tensor from one stage to another. The tensor is in use until `wait` has returned."""

    def wait(self) -> None:
        """Waits until the tensor has been sent or received. Raises CollectiveError."""
        ...


class PipelineLink(Protocol):
    """Connects the ranks with the same place in each stage. A sender and its receiver name the same step and channel,
    once each; transfers may begin and finish in any order. Several threads make calls."""

    stage: int
    num_stages: int
    # The step begun last, for error messages.
    step: int

    def send(self, x: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to send x, contiguous. channel: 0 or 1. Raises CollectiveError."""
        ...

    def receive(self, into: torch.Tensor, stage: int, *, step: int, channel: int) -> Transfer:
        """Begins to receive a tensor of the same size as `into`. Raises CollectiveError."""
        ...

    def leave(self) -> None:
        """Makes all transfers fail, here and at the other stages: current ones and later ones."""
        ...


class _Done:
    def wait(self) -> None:
        pass


class RehearsedPipeline:
    """A pipeline link that pretends to have other stages: for a warm-up, whose results are not used."""

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
    """A rank's groups in one epoch. By default the rank is alone."""

    # The ranks that share each layer.
    tensor: Group = _ALONE
    # The other stages; None if there is one stage.
    pipeline: PipelineLink | None = None
    # The ranks with the same place in replicas that compute their steps together.
    data: Group = _ALONE
    # The ranks of the same stage in all of these replicas: experts are divided among them. With one replica, it is the
    # tensor group itself.
    experts: Group = _ALONE

    @property
    def is_alone(self) -> bool:
        """True if no other rank computes with this one."""
        return self.pipeline is None and self.tensor.size == self.data.size == self.experts.size == 1

    def begin_step(self, step: int) -> None:
        """Sets the step that error messages name."""
        for each in self._all:
            each.step = step

    def leave(self) -> None:
        """Makes other ranks fail if they wait for this one, now or later."""
        for each in self._all:
            each.leave()

    @property
    def _all(self) -> Iterator[Group | PipelineLink]:
        yield from (self.tensor, self.data, self.experts)
        if self.pipeline is not None:
            yield self.pipeline


def without_others(axes: Axes, rank: int, replica: int = 0) -> Groups:
    """Returns groups to use until the ranks are connected. rank: within its replica."""
    tensor = alone_or_rehearsal(axes.tensor_rank(rank), axes.tensor_size)
    data, experts = _ALONE, tensor
    if axes.data_size > 1:
        data = alone_or_rehearsal(replica, axes.data_size)
        members = axes.expert_group(rank)
        experts = alone_or_rehearsal(members.index(axes.global_rank(rank, replica)), len(members))
    pipeline = RehearsedPipeline(axes.stage(rank), axes.pipeline_size) if axes.pipeline_size > 1 else None
    return Groups(tensor=tensor, pipeline=pipeline, data=data, experts=experts)
