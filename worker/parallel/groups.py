"""Whom a rank computes its steps with."""

from collections.abc import Iterator
from dataclasses import dataclass

from worker.parallel.axes import Axes
from worker.parallel.group import Alone, Group, alone_or_rehearsal
from worker.parallel.pipeline import PipelineLink, RehearsedPipeline

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
