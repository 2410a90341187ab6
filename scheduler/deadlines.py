"""When groups must have ended."""

import heapq


class Deadlines:
    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}  # by group
        # Those of groups that have ended leave when they come to the top, or when they are the most.
        self._heap: list[tuple[float, int]] = []

    def add(self, group: int, deadline: float) -> None:
        self._deadlines[group] = deadline
        heapq.heappush(self._heap, (deadline, group))

    def remove(self, group: int) -> None:
        """The group has ended. It need not have a deadline."""
        if self._deadlines.pop(group, None) is not None and len(self._heap) > 2 * len(self._deadlines) + 64:
            self._heap = [(deadline, group) for group, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> list[int]:
        """Takes out the groups whose deadline is not after `now`, the earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, group = heapq.heappop(self._heap)
            if self._deadlines.pop(group, None) is not None:
                due.append(group)
        return due
