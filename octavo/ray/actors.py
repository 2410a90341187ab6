"""Ray's actors and placement groups, as the fleet needs them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from octavo.cluster.processes import Stage
from octavo.ray.host import ProcessHost
from octavo.ray.placement import GroupPlan, Resources

# Seconds between two tries to reach an actor that Ray is restarting.
_RETRY_S = 0.25
# Heads of Ray clusters often offer no CPU, so that no work is placed there.
_ROUTER: Resources = {"CPU": 0}


class ActorGone(Exception):
    """A call got no answer: the actor, its node or the connection is gone. The message names Ray's error."""


class RayActor:
    """An octavo.ray.host.ProcessHost on any node."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method. Raises ActorGone, also while Ray restarts the actor."""
        try:
            return await getattr(self._handle, method).remote(*args, **kwargs)
        except self._ray.exceptions.RayActorError as error:
            raise ActorGone(type(error).__name__) from error

    async def call_patiently(self, method: str, *args: Any) -> Any:
        """Calls a method, and retries until the actor answers."""
        while True:
            try:
                return await self.call(method, *args)
            except ActorGone:
                await asyncio.sleep(_RETRY_S)

    def kill(self) -> None:
        """Ends the actor; Ray does not restart it."""
        self._ray.kill(self._handle, no_restart=True)


class RayActors:
    """The actors of one cluster. Ray frees their resources when this program disconnects."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._class = ray.remote(ProcessHost)
        self._groups: list[Any] = []

    async def place(self, groups: Sequence[GroupPlan]) -> None:
        """Returns once there is room for all groups; from then on the room is reserved."""
        util = self._ray.util
        self._groups = [util.placement_group(list(group.bundles), strategy=group.strategy) for group in groups]
        for group in self._groups:
            await group.ready()

    def start(self, name: str, stage: Stage, at: tuple[int, int], resources: Resources) -> RayActor:
        """Starts a ProcessHost. at: group and bundle."""
        group, bundle = at
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._groups[group], placement_group_bundle_index=bundle
        )
        return self._start(name, stage, resources, strategy)

    def start_here(self, name: str, stage: Stage) -> RayActor:
        """Starts a ProcessHost on this node."""
        node = self._ray.get_runtime_context().get_node_id()
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return self._start(name, stage, _ROUTER, strategy)

    def _start(self, name: str, stage: Stage, resources: Resources, strategy: Any) -> RayActor:
        handle = self._class.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            # Ray restarts it as long as this program lives.
            max_restarts=-1,
            scheduling_strategy=strategy,
        ).remote(name, int(stage))
        return RayActor(self._ray, handle)
