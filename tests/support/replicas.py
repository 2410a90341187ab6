"""Replicas of a router without a task that connects them: a test gives each its Session or channel."""

import grpc.aio

from router.replicas.policies import POLICIES
from router.replicas.replica import Replica, ReplicaOptions
from router.replicas.replica_set import ReplicaSet
from router.telemetry.metrics import RouterMetrics


def replica_set(addresses: list[str], metrics: RouterMetrics) -> ReplicaSet:
    options = ReplicaOptions(router_id="router", model_name="m", silence_timeout=10.0)
    return ReplicaSet(addresses, POLICIES["least_loaded"](), options, metrics)


def replica_at(address: str, channel: grpc.aio.Channel | None = None) -> Replica:
    """channel: to a server there; None: it is not connected yet."""
    [replica] = replica_set([address], RouterMetrics()).replicas
    replica._connection.channel = channel
    return replica
