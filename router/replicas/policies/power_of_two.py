"""Draws two replicas at random and chooses the one with less work.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996. Routers whose view of the loads is a
little old do not all choose the same replica, as they would with least_loaded.
"""

import random
from collections.abc import Sequence

from router.accepted import RoutingHints
from router.replicas.policies.base import ReplicaLoad, ready


class PowerOfTwo:
    name = "power_of_two"
    prefix_index = None

    def __init__(self, seed: int | None = None) -> None:
        """seed: for a simulation."""
        self._random = random.Random(seed)

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if len(loads) == 1:
            return 0, "only"
        candidates = ready(loads)
        if len(candidates) == 1:
            return candidates[0], "only"
        one, other = self._random.sample(candidates, 2)
        return min(one, other, key=lambda i: loads[i].num_tokens), "of_two"
