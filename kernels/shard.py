"""A rank's share of what a tensor-parallel group divides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Rank 0 of 1 has all."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def of(self, total: int, what: str) -> slice:
        """The rank's part of `total`, of equal parts. Raises ValueError, naming the option and what would work."""
        if total % self.size:
            valid = ", ".join(str(size) for size in range(1, min(total, 64) + 1) if total % size == 0)
            raise ValueError(
                f"tensor_parallel_size={self.size} does not divide the model's {what}, {total}; {valid} do"
            )
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def covering(self, total: int, what: str) -> slice:
        """As `of`, but the last part may be smaller: the others are `total` / `size`, rounded up. Raises ValueError if
        a rank would have none."""
        part = -(-total // self.size)
        if part * (self.size - 1) >= total:
            raise ValueError(f"tensor_parallel_size={self.size} is too much for the model's {what}, {total}")
        return slice(self.rank * part, min(total, (self.rank + 1) * part))


WHOLE = Shard()
