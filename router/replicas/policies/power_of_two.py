"""Two replicas at random, of these the one with less to do.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996. Several routers whose loads are a little
old do not all run to the same replica, as they do to the least loaded one.
"""

import random
from collections.abc import Sequence

from router.replicas.policies.base import ReplicaLoad, ready
from router.request import RoutingHints


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
