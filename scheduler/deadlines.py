"""When groups must have ended."""

from math import inf


class Deadlines:
    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}  # by group
        self._next = inf  # none is earlier; kept so that a step at which none passes costs nothing

    def add(self, group: int, deadline: float) -> None:
        self._deadlines[group] = deadline
        self._next = min(self._next, deadline)

    def remove(self, group: int) -> None:
        """The group has ended. It need not have a deadline."""
        self._deadlines.pop(group, None)

    def take_due(self, now: float) -> list[int]:
        """Takes out the groups whose deadline is not after `now`."""
        if now < self._next:
            return []
        due = [group for group, deadline in self._deadlines.items() if deadline <= now]
        for group in due:
            del self._deadlines[group]
        self._next = min(self._deadlines.values(), default=inf)
        return due
