"""Lets replicas take turns."""

from collections.abc import Sequence

from router.accepted import RoutingHints
from router.replicas.policies.base import ReplicaLoad, ready


class RoundRobin:
    """Takes replicas in the order of their numbers, whatever their load."""

    name = "round_robin"
    prefix_index = None

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        # In turns: the lowest number above the last one, else the lowest.
        index = min(ready(loads), key=lambda i: (loads[i].replica <= self._last, loads[i].replica))
        self._last = loads[index].replica
        return index, "turn"
