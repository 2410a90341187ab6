"""The workers' permanent rows: which are free, and which the workers must still be told to free."""


class Rows:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """The workers have forgotten every row."""
        # Low numbers go first.
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        """The next plan frees the row. That plan may use it again: it frees rows before it fills them."""
        self._free.append(row)
        self._untold.append(row)

    def take_freed(self) -> list[int]:
        """Rows released since the last plan, for the one being made."""
        freed, self._untold = self._untold, []
        return freed

    def check_integrity(self, used: list[int]) -> None:
        """Asserts that every row is either free or used by one sequence."""
        assert sorted(self._free + used) == list(range(self.num_rows)), "a row is lost or used twice"
        assert set(self._untold) <= set(self._free), "a row is to be freed while it is used"
