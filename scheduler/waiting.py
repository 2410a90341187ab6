"""The queue of sequences that wait."""

import heapq

from scheduler.request import Order, Sequence


class WaitingQueue:
    """Sequences in their order, whenever they came in: a preempted one stands where it stood before."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        # Taken out of the middle; their entries leave when they come to the top, or when they are the most.
        self._removed: set[Order] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def push(self, sequence: Sequence) -> None:
        if sequence.order in self._removed:
            self._removed.remove(sequence.order)  # its entry is still there
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The first; None if nothing waits."""
        while self._heap and self._heap[0][0] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes out the first, which `peek` has just shown."""
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits, wherever it stands."""
        self._removed.add(sequence.order)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._removed]
            self._removed.clear()
            heapq.heapify(self._heap)
