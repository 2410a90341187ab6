"""Which replica computes a request: one policy a file, behind one small interface."""

from router.policies.base import Policy, ReplicaLoad
from router.policies.least_loaded import LeastLoaded

__all__ = ["LeastLoaded", "Policy", "ReplicaLoad"]
