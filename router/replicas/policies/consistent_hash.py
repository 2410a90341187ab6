"""Sends the requests of a session to one replica, which then has the session's prefix in its cache.

Replicas are points on a ring, and a session goes to the next point after its own: a replica that comes or goes moves
only its own sessions. A replica with far more work than the others is passed over, as in "Consistent Hashing with
Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam, 2016).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from router.accepted import RoutingHints
from router.replicas.policies.base import ReplicaLoad, ready
from router.replicas.policies.least_loaded import LeastLoaded

# Points of each replica: with fewer, some replicas would get a multiple of what others get.
_POINTS = 128
# Most work of a replica that is not passed over: a multiple of the mean, or this many tokens if that is more.
_MOST_LOAD, _LITTLE_TOKENS = 1.25, 2048


class ConsistentHash:
    """Chooses by the request's session_key; without one, the least loaded replica."""

    name = "consistent_hash"
    prefix_index = None

    def __init__(self) -> None:
        self._without_key = LeastLoaded()

    def choose(self, loads: Sequence[ReplicaLoad], hints: RoutingHints) -> tuple[int, str]:
        if not hints.session_key or len(loads) == 1:
            return self._without_key.choose(loads, hints)
        of_replica = {loads[i].replica: i for i in ready(loads)}
        points, replicas = _ring(tuple(of_replica))
        mean = sum(loads[i].num_tokens for i in of_replica.values()) / len(of_replica)
        most = max(_MOST_LOAD * mean, _LITTLE_TOKENS)
        place = bisect_right(points, _point(hints.session_key))
        for step in range(len(points)):
            index = of_replica[replicas[(place + step) % len(points)]]
            if loads[index].num_tokens <= most:
                return index, "session" if not step else "overload"
        raise AssertionError("one of them has at most the mean")


@lru_cache(maxsize=4)
def _ring(replicas: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the points in order, and the replica of each."""
    ring = sorted((_point(f"replica {replica}, {i}"), replica) for replica in replicas for i in range(_POINTS))
    return [point for point, _ in ring], [replica for _, replica in ring]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
