"""Which replica computes a request: one policy a file, behind one small interface."""

from collections.abc import Callable

from router.policies.base import Placement, Policy, ReplicaLoad
from router.policies.consistent_hash import ConsistentHash
from router.policies.least_loaded import LeastLoaded
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.round_robin import RoundRobin

# By the names that the option routing_policy has for them.
POLICIES: dict[str, Callable[[], Policy]] = {
    each.name: each for each in (ConsistentHash, LeastLoaded, PowerOfTwo, PrefixAware, RoundRobin)
}

__all__ = ["POLICIES", "Placement", "Policy", "ReplicaLoad"]
