"""Computes the resources that a cluster needs from Ray's nodes, and how it is spread over them.

A replica's scheduler and workers share one bundle of a placement group, which Ray never divides, and the replicas'
bundles are spread over as many nodes as possible. Only if no node has room for a whole replica, each of its processes
gets its own bundle, in a group that Ray packs as tightly as it can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.options import Options

Resources = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The resources that one scheduler and one worker need."""

    scheduler: Resources
    worker: Resources
    world_size: int

    @property
    def replica(self) -> Resources:
        total = dict(self.scheduler)
        for name, count in self.worker.items():
            total[name] = total.get(name, 0) + count * self.world_size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A placement group. strategy: Ray's name for it, such as PACK."""

    strategy: str
    bundles: tuple[Resources, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    groups: tuple[GroupPlan, ...]
    # All replicas share one group, with a bundle each.
    is_whole: bool

    def scheduler_at(self, replica: int) -> tuple[int, int]:
        """Group and bundle."""
        return (0, replica) if self.is_whole else (replica, 0)

    def worker_at(self, replica: int, rank: int) -> tuple[int, int]:
        return (0, replica) if self.is_whole else (replica, 1 + rank)


def needs_of(options: Options, *, has_gpus: bool) -> Needs:
    """The needs of the options' processes. has_gpus: the Ray cluster has some, for device=auto."""
    on_gpus = options.device == "cuda" or (options.device == "auto" and has_gpus)
    worker: Resources = {"CPU": threads_of(options)}
    if on_gpus:
        worker["GPU"] = 1
    return Needs(scheduler={"CPU": 1}, worker=worker, world_size=options.world_size)


def threads_of(options: Options) -> int:
    """Threads of one worker, which are the CPUs it asks for."""
    return max(1, options.worker_threads)


def plan_placement(needs: Needs, num_replicas: int, nodes: Sequence[Mapping[str, float]]) -> PlacementPlan:
    """Plans the bundles. nodes: each node's total resources, in use or not."""
    replica = needs.replica
    if any(all(node.get(name, 0) >= count for name, count in replica.items()) for node in nodes):
        return PlacementPlan(groups=(GroupPlan(strategy="SPREAD", bundles=(replica,) * num_replicas),), is_whole=True)
    apart = GroupPlan(strategy="PACK", bundles=(needs.scheduler, *(needs.worker,) * needs.world_size))
    return PlacementPlan(groups=(apart,) * num_replicas, is_whole=False)
