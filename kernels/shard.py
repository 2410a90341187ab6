"""A rank's share of a model: its part of each layer, and its layers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Rank 0 of 1 has everything."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def of(self, total: int, what: str) -> slice:
        """The rank's equal slice of `total`. Raises ValueError, naming the option and what would work."""
        if total % self.size:
            valid = ", ".join(str(size) for size in range(1, min(total, 64) + 1) if total % size == 0)
            raise ValueError(
                f"tensor_parallel_size={self.size} does not divide the model's {what}, {total}; {valid} do"
            )
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def covering(self, total: int, what: str) -> slice:
        """Like `of`, but the last part may be smaller; the others are `total` / `size`, rounded up. Raises ValueError
        if a rank would have none."""
        part = -(-total // self.size)
        if part * (self.size - 1) >= total:
            raise ValueError(f"tensor_parallel_size={self.size} is too much for the model's {what}, {total}")
        return slice(self.rank * part, min(total, (self.rank + 1) * part))


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class ExpertShard(Shard):
    """A rank's share of a mixture's experts, each of which is whole. num_redundant: slots for copies of experts, on all
    ranks together; every step_interval steps, the copies in them follow the experts' load."""

    num_redundant: int = 0
    step_interval: int = 0


NOT_SHARED = ExpertShard()


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage `index` of `size`: a run of layers. num_layers: the layers of each stage; if empty, they are
    spread evenly, and the first stages get one more where there is a remainder."""

    index: int = 0
    size: int = 1
    num_layers: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def layers(self, total: int) -> range:
        """The stage's layers, out of `total`. Raises ValueError, naming the option and what would work."""
        if self.num_layers:
            if sum(self.num_layers) != total:
                given = ",".join(map(str, self.num_layers))
                raise ValueError(f"pipeline_layers={given} are {sum(self.num_layers)} layers; the model has {total}")
            counts = self.num_layers
        else:
            if self.size > total:
                raise ValueError(
                    f"pipeline_parallel_size={self.size}: the model has {total} layers; use {total} or less"
                )
            counts = tuple(total // self.size + (stage < total % self.size) for stage in range(self.size))
        first = sum(counts[: self.index])
        return range(first, first + counts[self.index])


ALL_LAYERS = Stage()
