"""Which ranks of a replica belong together."""

from dataclasses import dataclass

from configs.options import Options
from kernels.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Ranks of one stage are neighbours: rank = stage * tensor_size + tensor rank."""

    tensor_size: int = 1
    pipeline_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.pipeline_size

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor_size

    def stage(self, rank: int) -> int:
        return rank // self.tensor_size

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of its stage, in order."""
        first = self.stage(rank) * self.tensor_size
        return tuple(range(first, first + self.tensor_size))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of its place in all stages, in their order."""
        return tuple(range(self.tensor_rank(rank), self.world_size, self.tensor_size))

    def returns_results(self, rank: int) -> bool:
        """One rank of a replica does: the first of the last stage."""
        return rank == self.world_size - self.tensor_size


def axes_of(options: Options) -> Axes:
    return Axes(tensor_size=options.tensor_parallel_size)


def shard_of(options: Options, rank: int) -> Shard:
    """What a rank computes of each layer of its stage."""
    axes = axes_of(options)
    return Shard(axes.tensor_rank(rank), axes.tensor_size)
