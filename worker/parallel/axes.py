"""Divides the ranks of a replica into axes, and determines which part of the model each rank computes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.shard import NOT_SHARED, ExpertShard, Shard, Stage

if TYPE_CHECKING:
    # The GPU engine runs without pydantic.
    from configs.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The sizes of the axes. Within a replica, ranks of one stage are neighbours: rank = stage * tensor_size + tensor
    rank. Replicas that compute their steps together share one numbering: global rank = replica * world_size + rank."""

    tensor_size: int = 1
    pipeline_size: int = 1
    # Replicas that compute their steps together; 1 if each computes its own, however many there are.
    data_size: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_size * self.pipeline_size

    @property
    def num_ranks(self) -> int:
        """Ranks that connect with each other, and start and fail together."""
        return self.world_size * self.data_size

    def global_rank(self, rank: int, replica: int) -> int:
        """Here and below, `rank` is the rank within its replica. `replica` is 0 if each replica computes its own
        steps."""
        return replica * self.world_size + rank

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor_size

    def stage(self, rank: int) -> int:
        return rank // self.tensor_size

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the rank's stage, in order."""
        first = self.stage(rank) * self.tensor_size
        return tuple(range(first, first + self.tensor_size))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place in each stage, in the order of stages."""
        return tuple(range(self.tensor_rank(rank), self.world_size, self.tensor_size))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """The global ranks with the same place in each replica, in the order of replicas."""
        return tuple(range(rank, self.num_ranks, self.world_size))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the same stage in all replicas, in order: experts are divided among them."""
        firsts = range(0, self.num_ranks, self.world_size)
        return tuple(first + member for first in firsts for member in self.tensor_group(rank))

    def returns_results(self, rank: int) -> bool:
        """Returns True for one rank of a replica: the first of the last stage."""
        return rank == self.world_size - self.tensor_size


def axes_of(options: "Options") -> Axes:
    return Axes(
        tensor_size=options.tensor_parallel_size,
        pipeline_size=options.pipeline_parallel_size,
        data_size=options.data_parallel_size if options.in_lockstep else 1,
    )


def shard_of(options: "Options", rank: int) -> Shard:
    """Returns the part that a rank computes of each layer of its stage."""
    axes = axes_of(options)
    return Shard(axes.tensor_rank(rank), axes.tensor_size)


def experts_of(options: "Options", rank: int, replica: int = 0) -> ExpertShard:
    """Returns which of a mixture's whole experts a rank has: NOT_SHARED if each expert is split as all layers are."""
    axes = axes_of(options)
    if not options.enable_expert_parallel:
        return NOT_SHARED
    members = axes.expert_group(rank)
    return ExpertShard(
        members.index(axes.global_rank(rank, replica if axes.data_size > 1 else 0)),
        len(members),
        options.num_redundant_experts,
        options.eplb_step_interval,
    )


def stage_of(options: "Options", rank: int) -> Stage:
    """Returns which layers a rank computes."""
    axes = axes_of(options)
    return Stage(axes.stage(rank), axes.pipeline_size, options.pipeline_layers)
