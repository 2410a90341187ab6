"""Chooses processes to kill, kills them, and waits until they serve again."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faults.cluster import PATIENCE_S, Cluster, Kind, Place, until
from octavo import AsyncClient, SamplingParams

Victims = tuple[Place, ...]

# One kill in four takes two processes at once.
_DOUBLES_OF = 4
# The first pair leaves no replica at all.
_PAIRS = (
    (Kind.SCHEDULER, Kind.SCHEDULER),
    (Kind.WORKER, Kind.SCHEDULER),
    (Kind.ROUTER, Kind.ROUTER),
    (Kind.SCHEDULER, Kind.ROUTER),
    (Kind.WORKER, Kind.ROUTER),
    (Kind.WORKER, Kind.WORKER),
)

_EPOCH, _TOKENS = "octavo_worker_epoch", "octavo_generation_tokens_total"
_COUNTERS: tuple[str, ...] = ("octavo_resubmissions_total", "octavo_inexact_resumes_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that is over. at: seconds since the crowd began; back_after: seconds until each victim served again."""

    victims: Victims
    at: float
    num_live: int
    num_begun: int
    back_after: float

    @property
    def names(self) -> str:
        return names_of(self.victims)


def names_of(victims: Victims) -> str:
    """The victims' names, for people."""
    return " and ".join(map(str, victims))


def choose_kinds(num_kills: int, choose: random.Random) -> list[tuple[Kind, ...]]:
    """Returns the kinds to kill, in random order: a quarter of the kills, at least one, take two processes; the others
    take each kind in turn.

    With 20 kills, each kind dies five times alone; with three, one takes both schedulers, one a worker, one a router.
    """
    num_doubles = max(num_kills // _DOUBLES_OF, 1)
    kinds: list[tuple[Kind, ...]] = [_PAIRS[i % len(_PAIRS)] for i in range(num_doubles)]
    # Kinds that are in no pair come first.
    singles = sorted(Kind, key=lambda kind: any(kind in pair for pair in kinds))
    kinds += [(singles[i % len(singles)],) for i in range(num_kills - num_doubles)]
    choose.shuffle(kinds)
    return kinds


def choose_victims(cluster: Cluster, kinds: Sequence[Kind], choose: random.Random) -> Victims:
    """Chooses a different process for each of the kinds."""
    victims: list[Place] = []
    for kind in kinds:
        victims.append(choose.choice([place for place in cluster.places(kind) if place not in victims]))
    return tuple(victims)


class Killer:
    """Kills processes, and waits until they serve again: until each has done its work once more."""

    def __init__(self, cluster: Cluster, send_streams: Callable[[], None]) -> None:
        """send_streams: starts streams; called once a replica is ready again, since others took over its streams."""
        self._cluster = cluster
        self._send_streams = send_streams
        # Counts of the router processes that were killed.
        self._counted = dict.fromkeys(_COUNTERS, 0.0)

    async def kill(self, victims: Victims) -> float:
        """Kills the victims. Returns the seconds until all serve again. Raises TimeoutError."""
        names = names_of(victims)
        replicas = {place.number for place in victims if place.kind is not Kind.ROUTER}
        routers = [place for place in victims if place.kind is Kind.ROUTER]
        epochs = {replica: await self._scheduler_value(replica, _EPOCH) for replica in replicas}
        for name, count in (await self._counts(routers)).items():
            self._counted[name] += count
        began = time.monotonic()
        await asyncio.to_thread(self._cluster.kill, victims)
        await until(lambda: self._are_ready(routers, epochs), f"readiness after the kill of {names}")
        computed = {replica: await self._scheduler_value(replica, _TOKENS) for replica in replicas}
        self._send_streams()
        for router in routers:
            await self._ask(router)
        asked = itertools.cycle(self._cluster.places(Kind.ROUTER))
        await until(lambda: self._compute(computed, next(asked)), f"tokens of each replica after the kill of {names}")
        return time.monotonic() - began

    async def counters(self) -> dict[str, int]:
        """Sums the routers' counters over all their processes, without counts between the last look and a kill."""
        counts = await self._counts(self._cluster.places(Kind.ROUTER))
        return {name: round(before + counts[name]) for name, before in self._counted.items()}

    async def _are_ready(self, routers: Sequence[Place], epochs: Mapping[int, float]) -> bool:
        """Returns whether each replica is in a new epoch (routers may still see the old one) and all routers see it."""
        for replica, epoch in epochs.items():
            if await self._scheduler_value(replica, _EPOCH) <= epoch or not await self._cluster.is_ready(replica):
                return False
        return all([await self._cluster.is_healthy(router) for router in routers])

    async def _compute(self, computed: Mapping[int, float], router: Place) -> bool:
        """Returns whether all replicas have computed tokens since; if not, asks the router for a token. Routers avoid
        a replica for a while after its Sessions have broken too often, so all streams may be elsewhere."""
        has_computed = all(
            [await self._scheduler_value(replica, _TOKENS) > before for replica, before in computed.items()]
        )
        if not has_computed:
            await self._ask(router)
        return has_computed

    async def _ask(self, router: Place) -> None:
        """Asks this router alone for a token, ahead of the streams that wait (scheduling_policy=priority)."""
        async with AsyncClient(
            self._cluster.targets[router.number], timeout=PATIENCE_S, retry_for=PATIENCE_S
        ) as client:
            await client.generate("One", SamplingParams(max_tokens=1, temperature=0), priority=-1)

    async def _scheduler_value(self, replica: int, name: str) -> float:
        """A metric of the replica's scheduler; 0 while it does not answer."""
        samples = await self._cluster.samples(Place(Kind.SCHEDULER, replica))
        return 0.0 if samples is None else samples.value(name)

    async def _counts(self, routers: Sequence[Place]) -> dict[str, float]:
        answers = [samples for router in routers if (samples := await self._cluster.samples(router)) is not None]
        return {name: sum(samples.value(name) for samples in answers) for name in _COUNTERS}
