"""Host blocks, which hold the KV of swapped sequences."""


class HostBlocks:
    """Blocks 0..num_blocks-1 of the workers' swap pool. Each belongs to one sequence."""

    def __init__(self, num_blocks: int) -> None:
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """The workers have forgotten what is in them."""
        self.num_blocks = num_blocks
        # Low numbers go first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """There must be enough."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """What is in them is not needed any more once the plan being made has been carried out."""
        self._free += reversed(blocks)

    def save(self) -> list[int]:
        """The free blocks: for `restore`."""
        return list(self._free)

    def restore(self, free: list[int]) -> None:
        """What `save` gave; sequences hold the others."""
        self._free = list(free)

    def check_integrity(self, held: list[int]) -> None:
        """Asserts that every block is either free or held by one sequence."""
        assert sorted(self._free + held) == list(range(self.num_blocks)), "a host block is lost, or held twice"
