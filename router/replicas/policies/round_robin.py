"""Replicas take turns."""

from collections.abc import Sequence

from router.replicas.policies.base import ReplicaLoad, ready
from router.request import RoutingHints


class RoundRobin:
    """In the order of their numbers, whatever they have to do."""

    name = "round_robin"
    prefix_index = None

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        # The next number after the last one's, or the first.
        index = min(ready(loads), key=lambda i: (loads[i].replica <= self._last, loads[i].replica))
        self._last = loads[index].replica
        return index, "turn"
