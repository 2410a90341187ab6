"""The rows of the workers: which are free, and which rest until the steps that may name them have returned."""

from collections import deque


class Rows:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Frees every row: the workers have lost them all."""
        # Low row numbers are taken first.
        self._free = list(range(self.num_rows - 1, -1, -1))
        # (last step that may name it, row), in order: the row is free once that step has returned.
        self._resting: deque[tuple[int, int]] = deque()
        # Released rows that no plan has listed as freed yet.
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int, *, last_step: int) -> None:
        """Releases a row; the next plan lists it as freed. It can be taken once the result of `last_step` is there; 0:
        at once, even by the next plan, because a plan frees rows before it fills them."""
        self._untold.append(row)
        if last_step:
            self._resting.append((last_step, row))
        else:
            self._free.append(row)

    def step_returned(self, step: int) -> None:
        while self._resting and self._resting[0][0] <= step:
            self._free.append(self._resting.popleft()[1])

    def take_freed(self) -> list[int]:
        """Returns the rows released since the last plan, for the plan being made."""
        freed, self._untold = self._untold, []
        return freed

    def save(self) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Returns free, resting and untold rows, for `restore`."""
        return list(self._free), list(self._resting), list(self._untold)

    def restore(self, free: list[int], resting: list[tuple[int, int]], untold: list[int]) -> None:
        """Takes what `save` returned; all other rows are in use."""
        self._free, self._resting, self._untold = list(free), deque(resting), list(untold)

    def check_integrity(self, used: list[int]) -> None:
        """Asserts that every row is either free, or resting, or used by one sequence."""
        idle = self._free + [row for _, row in self._resting]
        assert sorted(idle + used) == list(range(self.num_rows)), "a row is lost or used twice"
        assert set(self._untold) <= set(idle), "a row is to be freed while it is used"
