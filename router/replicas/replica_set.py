"""All replicas behind this router, and the choice among them."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence

from configs.features import named
from configs.sampling import MAX_LOGPROBS
from protos.inference_pb2 import ModelInfo
from router.accepted import RoutingHints
from router.errors import MissingFeature, NoReplica
from router.replicas.health.pace import Pace, PaceSettings, State
from router.replicas.policies import Policy, ReplicaLoad
from router.replicas.replica import Replica, ReplicaOptions
from router.replicas.session import Session
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger("octavo.router.replicas")


def missing_feature(needed: frozenset[str]) -> MissingFeature:
    """needed: the features of a request that nothing here has."""
    return MissingFeature(f"{named(needed)}: no replica here can do that; update one, or leave it unset")


class ReplicaSet:
    """All replicas, and the choice among them."""

    def __init__(
        self,
        addresses: Sequence[str],
        policy: Policy,
        options: ReplicaOptions,
        metrics: RouterMetrics,
        pace_settings: PaceSettings | None = None,
    ) -> None:
        """addresses: entries of scheduler_addresses. pace_settings: None: all replicas count as equally fast."""
        paces: list[Pace] = []
        self.replicas = [
            Replica(
                number,
                address,
                options,
                metrics,
                pace=Pace(pace_settings or PaceSettings(), paces),
                prefix_index=policy.prefix_index,
                on_change=self._changed,
            )
            for number, address in enumerate(addresses)
        ]
        self._policy = policy
        self._metrics = metrics
        self._watchers: list[Callable[[ReplicaSet], None]] = []
        self.all_ready = asyncio.Event()
        self._model: ModelInfo | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # The states and epochs that events have told.
        self._told = [("away", 0)] * len(self.replicas)

    @property
    def model(self) -> ModelInfo | None:
        """The model of the latest Welcome; None before the first one."""
        return self._model

    @property
    def media_json(self) -> str:
        """ModelInfo.media_json of the replicas that take items; empty: none of them does."""
        there = sorted(self.replicas, key=lambda replica: replica.session is None)
        latest = "" if self._model is None else self._model.media_json
        # Those that are away count, too: their items wait for them.
        return next((replica.media_json for replica in there if replica.media_json), latest)

    @property
    def max_logprobs(self) -> int:
        """The highest that a replica allows."""
        return max(replica.max_logprobs for replica in self.replicas)

    @property
    def num_ready(self) -> int:
        return sum(replica.ready for replica in self.replicas)

    @property
    def num_usable(self) -> int:
        return sum(replica.usable for replica in self.replicas)

    def subscribe(self, on_change: Callable[["ReplicaSet"], None]) -> None:
        """on_change: called whenever a replica becomes usable or ready, ceases to be, stalls, or changes its pace."""
        self._watchers.append(on_change)

    def describe(self) -> str:
        return "; ".join(replica.describe() for replica in self.replicas)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(replica.run(), name=f"replica {replica.address}") for replica in self.replicas
        ]
        for task in self._tasks:
            task.add_done_callback(_report_crash)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def choose(self, hints: RoutingHints, fingerprint: str = "", exclude: Collection[Session] = ()) -> Session:
        """Returns the Session to submit to, of a replica of `fingerprint` if there is one. Raises NoReplica, or
        MissingFeature if none is known to have the features that the request needs."""
        usable = [replica for replica in self.replicas if replica.usable and replica.session not in exclude]
        if hints.features or hints.num_logprobs > MAX_LOGPROBS:
            usable = self._able(usable, hints)
        if not usable:
            raise NoReplica(f"no replica is ready: {self.describe()}; try again in a few seconds")
        equal = [replica for replica in usable if fingerprint and replica.fingerprint(hints) == fingerprint]
        candidates = equal or usable
        now = time.monotonic()
        # If all are left out, none is: a replica that fails often or is slow is better than none.
        candidates = [each for each in candidates if each.breaker.allows(now)] or candidates
        chosen = self._choose([each for each in candidates if _takes(each)] or candidates, hints)
        assert chosen.session is not None
        return chosen.session

    def choose_ready(self, among: Collection[Replica], hints: RoutingHints, fingerprint: str = "") -> Replica | None:
        """Returns a replica that takes and computes requests at once, and is of `fingerprint`, if that is given; None
        if there is none."""
        now = time.monotonic()
        candidates = [
            each
            for each in among
            if each.ready
            and each.can(hints)
            and each.breaker.allows(now)
            and fingerprint in ("", each.fingerprint(hints))
            and not (each.session is not None and each.session.refuses(hints.priority, hints.tenant))
        ]
        fast = [each for each in candidates if each.pace.state is State.FULL]
        return self._choose(fast or candidates, hints) if candidates else None

    def _able(self, usable: Sequence[Replica], hints: RoutingHints) -> list[Replica]:
        """Returns the replicas that have these features. Raises MissingFeature if there are replicas, but none had them
        when it was there last."""
        able = [replica for replica in usable if replica.can(hints)]
        if usable and not any(replica.can(hints) for replica in self.replicas):
            raise missing_feature(hints.features or frozenset({"logprobs"}))
        return able

    def _choose(self, candidates: Sequence[Replica], hints: RoutingHints) -> Replica:
        """Applies the policy to the replicas whose queues are not full; to all if every queue is full."""
        candidates = [
            each
            for each in candidates
            if each.session is not None and not each.session.refuses(hints.priority, hints.tenant)
        ] or candidates
        loads = [
            ReplicaLoad(
                replica=replica.number,
                num_sequences=session.num_sequences,
                num_queued_tokens=session.num_queued_tokens,
                workers_ready=session.load.workers_ready,
            )
            for replica in candidates
            if (session := replica.session) is not None
        ]
        index, reason = self._policy.choose(loads, hints)
        self._metrics.routing_decisions.labels(self._policy.name, reason).inc()
        candidates[index].breaker.sent(time.monotonic())
        return candidates[index]

    def _changed(self) -> None:
        for replica in self.replicas:
            self._metrics.replica_ready.labels(replica.address).set(replica.ready)
            if replica.session is not None:
                self._model = replica.session.welcome.model
        self._tell_changes()
        if self.num_ready == len(self.replicas):
            self.all_ready.set()
        else:
            self.all_ready.clear()
        for on_change in self._watchers:
            on_change(self)

    def _tell_changes(self) -> None:
        """Notes the replicas whose state or epoch has changed."""
        for number, replica in enumerate(self.replicas):
            epoch = self._told[number][1] if replica.session is None else replica.session.welcome.epoch
            now = replica.state, epoch
            if now != self._told[number]:
                self._told[number] = now
                self._metrics.events.note("replica", f"{replica.describe()}; epoch {epoch}", replica=replica.address)


def _takes(replica: Replica) -> bool:
    """Returns True if the replica's pace lets it take part in a choice."""
    return replica.session is not None and replica.pace.takes(replica.session.num_sequences)


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
