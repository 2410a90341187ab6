"""Chooses the replica with the least work."""

from collections.abc import Sequence

from router.accepted import RoutingHints
from router.replicas.policies.base import ReplicaLoad, ready


class LeastLoaded:
    """Compares tokens; equals take turns. A replica whose workers are away comes last, however little its work."""

    name = "least_loaded"
    prefix_index = None

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        candidates = ready(loads)
        least = min(loads[i].num_tokens for i in candidates)
        equals = [i for i in candidates if loads[i].num_tokens == least]
        if len(equals) == 1:
            return equals[0], "least"
        self._turn += 1
        return equals[self._turn % len(equals)], "tie"
