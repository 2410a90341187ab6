"""Runs the processes of a cluster as Ray actors: places them, connects them, and follows them when they move.

Ray itself restarts an actor whose node has gone, in a bundle that it places elsewhere. This module does the rest: each
scheduler reports its new address, the router gets it in a file, and the replica's workers are restarted with it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from configs.options import Options
from octavo.cluster.display import Display
from octavo.cluster.errors import ClusterError
from octavo.cluster.processes import ProcessSpec, Stage, Unit
from octavo.cluster.quarantine import quarantine_of, quarantine_text, released_text
from octavo.cluster.readiness import grpc_target
from octavo.ray.actors import ActorGone, RayActor, RayActors
from octavo.ray.placement import Needs, PlacementPlan
from octavo.ray.settings import ProcessSettings, router_settings, scheduler_settings, worker_settings
from runtime.telemetry.quarantine import FILE_NAME, QuarantineNote, text_of

log = logging.getLogger("octavo.ray")

_HEALTH_INTERVAL = 1.0
_PATIENCE_S = 10.0
# Seconds for the call to an actor, on top of the time its process may take to end.
_STOP_GRACE = 5.0
# Seconds for a process to end when its replica is put in quarantine.
_SHUT_GRACE = 5.0
_LOOK_S = 5.0
# Ports of a scheduler: for routers, for its workers, and for their heartbeats.
_NUM_PORTS = 3


class RayFleet:
    """An octavo.cluster.launcher.Fleet whose processes are Ray actors."""

    def __init__(
        self,
        options: Options,
        actors: RayActors,
        plan: PlacementPlan,
        needs: Needs,
        keys: Mapping[str, str],
        display: Display,
        specs: list[ProcessSpec],
    ) -> None:
        """keys: the files of a directory that `octavo keys` made, by name. specs: of all processes; their commands are
        not used here."""
        self._options, self._actors, self._plan, self._needs, self._keys = options, actors, plan, needs, keys
        self._display = display
        self._specs = {spec.name: spec for spec in specs}
        self._hosts: dict[str, RayActor] = {}
        # Where each replica's scheduler is, once known: the node's address and its first port.
        self._places: dict[int, tuple[str, int]] = {}
        self._has_moved = asyncio.Condition()
        self._placing: asyncio.Task[None] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.first_wave_begun = asyncio.Event()
        self._quarantine = quarantine_of(options, specs, self._note_quarantine)
        self._shutting: set[asyncio.Task[None]] = set()
        # For the router's file; empty: no replica was in quarantine.
        self._notes = ""
        self._has_notes = asyncio.Condition()

    async def run(self) -> None:
        """As octavo.cluster.supervisor.Supervisor.run."""
        try:
            self._placing = asyncio.create_task(self._actors.place(self._plan.groups))
            if not await self._has_room():
                return
            self._start()
            self._keepers = [asyncio.create_task(each) for each in self._all_keepers()]
            self.first_wave_begun.set()
            done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not task.cancelled():
                    task.result()
        except BaseException:
            await self.stop({})
            raise

    async def stop(self, grace: Mapping[Stage, float]) -> None:
        """As octavo.cluster.supervisor.Supervisor.stop."""
        self._is_stopping = True
        if self._placing is not None:
            self._placing.cancel()
        for stage in Stage:
            members = [host for name, host in self._hosts.items() if self._specs[name].stage is stage]
            seconds = grace.get(stage, 5.0)
            # An actor that Ray is moving has no process to end, or its process gets killed.
            await self._tell(members, seconds + _STOP_GRACE, "stop", seconds)
        await self._tell(list(self._hosts.values()), _STOP_GRACE, "clean_up")
        for task in (*self._keepers, *self._shutting):
            task.cancel()
        self.kill()

    async def _tell(self, hosts: list[RayActor], seconds: float, method: str, *args: object) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(host.call(method, *args) for host in hosts), return_exceptions=True)

    def kill(self) -> None:
        """Ends all processes at once."""
        self._is_stopping = True
        for host in self._hosts.values():
            host.kill()

    async def watch(self) -> None:
        """Shows the processes' progress until cancelled."""
        while True:
            for name, host in list(self._hosts.items()):
                with contextlib.suppress(ActorGone):
                    if (health := await host.call("health")) is not None:
                        self._display.state(self._specs[name], health[1], health[0])
            await asyncio.sleep(_HEALTH_INTERVAL)

    # --- Placing processes

    async def _has_room(self) -> bool:
        """Waits until Ray has room. Returns False if `stop` was called first."""
        assert self._placing is not None
        while not (await asyncio.wait({self._placing}, timeout=_PATIENCE_S))[0]:
            bundles = [bundle for group in self._plan.groups for bundle in group.bundles]
            self._display.event(self._specs["router"], f"waits: Ray has no room yet for {bundles}")
        if self._placing.cancelled():
            return False
        self._placing.result()
        return True

    def _start(self) -> None:
        options, needs, plan = self._options, self._needs, self._plan
        self._hosts["router"] = self._actors.start_here("router", Stage.ROUTER)
        for replica in range(options.data_parallel_size):
            name = f"scheduler {replica}"
            at = plan.scheduler_at(replica)
            self._hosts[name] = self._actors.start(name, Stage.SCHEDULER, at, needs.scheduler)
            for rank in range(options.world_size):
                name, at = f"worker {replica}.{rank}", plan.worker_at(replica, rank)
                self._hosts[name] = self._actors.start(name, Stage.WORKER, at, needs.worker)

    async def _note_place(self, replica: int, place: tuple[str, int]) -> None:
        async with self._has_moved:
            self._places[replica] = place
            self._has_moved.notify_all()

    async def _place_other_than(self, replica: int, known: tuple[str, int] | None) -> tuple[str, int]:
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: self._places.get(replica, known) != known)
            return self._places[replica]

    # --- Keeping them running

    def _all_keepers(self) -> list[Coroutine[Any, Any, None]]:
        keepers: list[Coroutine[Any, Any, None]] = [self._keep_router()]
        for replica in range(self._options.data_parallel_size):
            keepers.append(self._keep_scheduler(replica))
            keepers += [self._keep_worker(replica, rank) for rank in range(self._options.world_size)]
        return [*keepers, self._watch_units(), *map(self._pass_on_news, self._hosts)]

    async def _keep_router(self) -> None:
        host = self._hosts["router"]
        while not self._is_stopping:
            telling = [asyncio.create_task(self._tell_router(each)) for each in range(self._options.data_parallel_size)]
            telling.append(asyncio.create_task(self._tell_router_of_quarantine()))
            try:
                await self._run("router", host, router_settings(self._options))
            finally:
                for task in telling:
                    task.cancel()

    async def _tell_router(self, replica: int) -> None:
        place: tuple[str, int] | None = None
        while True:
            place = await self._place_other_than(replica, place)
            await self._hosts["router"].call_patiently("write", f"scheduler-{replica}", grpc_target(*place))

    async def _tell_router_of_quarantine(self) -> None:
        written = ""
        while True:
            async with self._has_notes:
                await self._has_notes.wait_for(lambda written=written: self._notes != written)
                written = self._notes
            await self._hosts["router"].call_patiently("write", FILE_NAME, written)

    async def _keep_scheduler(self, replica: int) -> None:
        name, node, port = f"scheduler {replica}", "", 0
        host, unit = self._hosts[name], self._unit(name)
        while not self._is_stopping:
            await self._quarantine.released(unit)
            node, address, port = await host.call_patiently("place", _NUM_PORTS, (node, port))
            log.info("%s is at %s:%d", name, address, port)
            await self._note_place(replica, (address, port))
            settings = scheduler_settings(self._options, self._keys, replica, (address, port))
            await self._run(name, host, settings)

    async def _keep_worker(self, replica: int, rank: int) -> None:
        name, place = f"worker {replica}.{rank}", None
        host, unit = self._hosts[name], self._unit(name)
        while not self._is_stopping:
            await self._quarantine.released(unit)
            _, address, _ = await host.call_patiently("place")
            place = self._places.get(replica) or await self._place_other_than(replica, None)
            settings = worker_settings(self._options, self._keys, replica, rank, place, address)
            running = asyncio.create_task(self._run(name, host, settings))
            moving = asyncio.create_task(self._place_other_than(replica, place))
            try:
                await asyncio.wait({running, moving}, return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    # The scheduler has moved: the worker could no longer find it.
                    with contextlib.suppress(ActorGone):
                        await host.call("stop", 5.0)
                await running
            finally:
                moving.cancel()
                running.cancel()

    async def _run(self, name: str, host: RayActor, settings: ProcessSettings) -> None:
        """Runs a process until it was told to end, its actor has gone, or it is given up. Raises ProcessFailed if the
        cluster ends with it."""
        options = self._options
        spec = self._specs[name]
        if self._quarantine.is_in(spec.unit):
            return
        try:
            cause = await host.call(
                "run",
                settings.arguments,
                settings.options,
                settings.files,
                max_restarts=options.max_restarts,
                metrics_host=options.metrics_host,
                health_port=spec.health_port,
                hang_timeout=options.hang_timeout,
            )
        except ActorGone as error:
            if not self._is_stopping:
                self._display.event(spec, f"is gone ({error}); Ray starts it again")
            return
        if cause and not self._is_stopping and not self._quarantine.is_in(spec.unit):
            seconds = self._quarantine.put(self._unit(name), cause, time.monotonic())
            self._display.event(spec, quarantine_text(spec, cause, seconds))
            self._shutting.add(task := asyncio.create_task(self._shut(spec, seconds)))
            task.add_done_callback(self._shutting.discard)

    # --- Quarantine

    def note_serving(self) -> None:
        """As octavo.cluster.supervisor.Supervisor.note_serving."""
        self._quarantine.note_serving()

    def _unit(self, name: str) -> Unit:
        unit = self._specs[name].unit
        assert unit is not None
        return unit

    async def _shut(self, failed: ProcessSpec, seconds: float) -> None:
        over = asyncio.ensure_future(asyncio.sleep(seconds))
        members = [name for name in self._hosts if self._specs[name].unit == failed.unit]
        for stage in Stage:
            hosts = [self._hosts[name] for name in members if self._specs[name].stage is stage]
            await self._tell(hosts, _SHUT_GRACE + _STOP_GRACE, "stop", _SHUT_GRACE)
        await over
        unit = self._unit(failed.name)
        self._display.event(failed, released_text(unit))
        self._quarantine.release(unit, time.monotonic())

    def _note_quarantine(self, notes: Mapping[int, QuarantineNote]) -> None:
        self._notes = text_of(notes)
        self._shutting.add(task := asyncio.create_task(self._notify()))
        task.add_done_callback(self._shutting.discard)

    async def _notify(self) -> None:
        async with self._has_notes:
            self._has_notes.notify_all()

    async def _watch_units(self) -> None:
        """Notes which replicas serve. Raises ProcessFailed if none has been left for too long."""
        units = {spec.unit for spec in self._specs.values() if spec.unit is not None and spec.unit.replicas}
        while True:
            for unit in units:
                if self._quarantine.is_watched(unit):
                    self._quarantine.note_health(unit, await self._is_well(unit), time.monotonic())
            if (since := self._quarantine.none_since) is not None:
                self._quarantine.check(time.monotonic() - since)
            await asyncio.sleep(_HEALTH_INTERVAL)

    async def _is_well(self, unit: Unit) -> bool | None:
        """Asks all processes of a unit for their /health; None: they have none."""
        hosts = [self._hosts[name] for name, spec in self._specs.items() if spec.unit == unit and spec.health_port]
        if not hosts:
            return None
        with contextlib.suppress(TimeoutError, ActorGone):
            async with asyncio.timeout(_LOOK_S):
                states = await asyncio.gather(*(host.call("health") for host in hosts))
                return all(state is not None and state[0] for state in states)
        return False

    async def _pass_on_news(self, name: str) -> None:
        spec, host = self._specs[name], self._hosts[name]
        while True:
            for kind, text in await host.call_patiently("news"):
                if kind == "event":
                    self._display.event(spec, text)
                else:
                    self._display.line(spec, text)


def check(options: Options) -> None:
    """Raises ClusterError for options that do not work on Ray."""
    if options.in_lockstep:
        raise ClusterError(
            "enable_expert_parallel on Ray takes data_parallel_size=1: replicas that compute their steps "
            "together need their schedulers' addresses in advance"
        )
    if options.num_router_processes > 1:
        raise ClusterError(
            f"num_routers={options.num_routers}, api_server_count={options.api_server_count}: `octavo up --on ray` "
            "starts one router, on this node"
        )
    for name in ("scheduler_addresses", "step_addresses", "curve_dir", "worker_host"):
        if getattr(options, name):
            raise ClusterError(
                f"{name} is made by `octavo up --on ray` once Ray has placed the processes: leave it out"
            )
