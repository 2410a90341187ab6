"""Policies that choose the replica for a request: one a file, behind one small interface."""

from collections.abc import Callable

from router.replicas.policies.base import Policy, ReplicaLoad
from router.replicas.policies.consistent_hash import ConsistentHash
from router.replicas.policies.least_loaded import LeastLoaded
from router.replicas.policies.power_of_two import PowerOfTwo
from router.replicas.policies.prefix_aware import PrefixAware
from router.replicas.policies.round_robin import RoundRobin

# By name, as in the option routing_policy.
POLICIES: dict[str, Callable[[], Policy]] = {
    each.name: each for each in (ConsistentHash, LeastLoaded, PowerOfTwo, PrefixAware, RoundRobin)
}

__all__ = ["POLICIES", "Policy", "ReplicaLoad"]
