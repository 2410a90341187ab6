"""The sequences that wait, and whose turn it is.

Tenants are served by weight: next comes the one that has been served least. That is the Virtual Token Counter (Sheng
and others, "Fairness in Serving Large Language Models", OSDI 2024). A tenant's counter grows by the tokens that it has
begun to compute, divided by its weight. A tenant that begins to wait gets at least the counter of those that wait
already, so time in which it asked for nothing earns it nothing.
"""

import heapq

from scheduler.core.messages import GroupRequest
from scheduler.core.state.request import Order, Sequence

# An output token costs as much as two prompt tokens, as in that paper.
OUTPUT_TOKEN_COST = 2


class TenantShares:
    """The counter of each tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        # No tenant that begins to wait gets less than this.
        self._floor = 0.0

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, self._floor)

    def charge(self, request: GroupRequest, cost: int) -> None:
        """Counts what is computed for a request's tenant. cost: in prompt tokens."""
        self._served[request.tenant] = self.served(request.tenant) + cost / request.weight

    def raise_floor(self, floor: float) -> None:
        """Sets the least counter of a tenant that begins to wait; it never falls."""
        self._floor = max(self._floor, floor)

    def begin(self, tenant: str, num_waiting: int) -> None:
        """Raises the counter of a tenant that begins to wait. num_waiting: tenants that wait already."""
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > 2 * num_waiting + 64:
            # The others would be raised to the floor anyway.
            self._served = {each: served for each, served in self._served.items() if served > self._floor}
            self._served.setdefault(tenant, self._floor)

    def save(self) -> tuple[dict[str, float], float]:
        """Returns counters and floor, for `restore`."""
        return dict(self._served), self._floor

    def restore(self, served: dict[str, float], floor: float) -> None:
        self._served, self._floor = dict(served), floor


class _Lane:
    """The waiting sequences of one tenant, sorted by `Sequence.order`: a preempted one returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        # Removed from the middle; their entries are dropped when they reach the top, or once they are the majority.
        self._removed: set[Order] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def push(self, sequence: Sequence) -> None:
        if sequence.order in self._removed:
            self._removed.remove(sequence.order)  # its entry is still there
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def first(self) -> Sequence:
        while self._heap[0][0] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place."""
        self._removed.add(sequence.order)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._removed]
            self._removed.clear()
            heapq.heapify(self._heap)


class WaitingQueue:
    """Waiting sequences, in order: of all tenants' first ones, that of the tenant served least comes first."""

    def __init__(self, *, priority_first: bool) -> None:
        """priority_first: a lower priority number goes before any share; tenants share among equal ones."""
        self.shares = TenantShares()
        self._priority_first = priority_first
        self._lanes: dict[str, _Lane] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def arrive(self, request: GroupRequest) -> None:
        """Notes that a tenant asks for more. Call it before `push` of a new request's sequences."""
        if request.tenant in self._lanes:
            return
        if self._lanes:
            self.shares.raise_floor(min(map(self.shares.served, self._lanes)))
        self.shares.begin(request.tenant, len(self._lanes))

    def push(self, sequence: Sequence) -> None:
        self._num_waiting += 1
        self._lanes.setdefault(sequence.group.request.tenant, _Lane()).push(sequence)

    def peek(self) -> Sequence | None:
        """The first sequence; None if nothing waits."""
        if not self._lanes:
            return None
        firsts = (lane.first() for lane in self._lanes.values())
        return next(firsts) if len(self._lanes) == 1 else min(firsts, key=self.rank)

    def rank(self, sequence: Sequence) -> tuple[float, float, Order]:
        """The place of a sequence among the first ones of all tenants."""
        first = sequence.order[0] if self._priority_first else 0
        return first, self.shares.served(sequence.group.request.tenant), sequence.order

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place in the queue."""
        self._num_waiting -= 1
        tenant = sequence.group.request.tenant
        lane = self._lanes[tenant]
        lane.remove(sequence)
        if not lane:
            del self._lanes[tenant]
            if not self._lanes:
                self.shares.raise_floor(self.shares.served(tenant))

    def check_integrity(self) -> None:
        """Asserts that the lanes hold what is counted."""
        assert all(self._lanes.values()), "a tenant without sequences has a lane"
        assert self._num_waiting == sum(map(len, self._lanes.values()))
