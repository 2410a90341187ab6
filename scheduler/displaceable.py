"""Which of the queued groups would run last, and so make way first."""

import heapq

from scheduler.messages import GroupRequest


class Displaceable:
    """Groups that have not begun: not here, and nowhere else either, for a client holds no token of them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # (-priority, -arrival), by group
        # Those of groups that have gone leave when they come to the top, or when they are the most.
        self._heap: list[tuple[tuple[int, int], int]] = []

    def add(self, request: GroupRequest, arrival: int) -> None:
        """Nothing, if it has begun elsewhere."""
        if any(start.output_token_ids for start in request.choices):
            return
        self._places[request.group] = -request.priority, -arrival
        heapq.heappush(self._heap, (self._places[request.group], request.group))

    def discard(self, group: int) -> None:
        """The group waits no more. It need not be here."""
        if self._places.pop(group, None) is not None and len(self._heap) > 2 * len(self._places) + 64:
            self._heap = [(place, group) for group, place in self._places.items()]
            heapq.heapify(self._heap)

    @property
    def lowest_priority(self) -> int | None:
        """The largest number that a group here has; None: there is none."""
        while self._heap and self._heap[0][1] not in self._places:
            heapq.heappop(self._heap)
        return -self._heap[0][0][0] if self._heap else None

    def pop_last(self, priority: int) -> int | None:
        """The last in order, if its priority is lower than this one: it has to leave the queue, or to be put back."""
        lowest = self.lowest_priority
        return None if lowest is None or lowest <= priority else heapq.heappop(self._heap)[1]

    def put_back(self, group: int) -> None:
        heapq.heappush(self._heap, (self._places[group], group))
