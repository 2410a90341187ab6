"""Moves streams off a replica that still has them, because it drains, stalls or is slow, or on request.

Nothing is lost or repeated: the other replica begins with the tokens that the client has, and what the previous one
still sends is dropped.
"""

import asyncio
import logging
from collections.abc import Generator, Iterator

from protos.admin_pb2 import MigrateResponse
from router.errors import InvalidRequest, NotMigrated
from router.replicas.replica import Replica
from router.replicas.replica_set import ReplicaSet
from router.streams.placement import Dispatcher, Placement
from router.telemetry.metrics import RouterMetrics
from router.turns import run_in_slices

log = logging.getLogger("octavo.router.migrations")

# Delay of a look after a change, and its limit if changes continue: replicas that begin to drain together, as when all
# are told to stop, keep their streams, which have nowhere to go.
_SETTLE_S, _SETTLED_S = 0.25, 1.0
# Streams that could not leave try again: a full queue does not tell when it has room.
_LOOK_AGAIN_S = 1.0
# A move computes the whole context again, too much for a stream with no more tokens than this to come.
_FEW_TOKENS = 8


class Migrations:
    def __init__(self, replicas: ReplicaSet, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._next_look: asyncio.TimerHandle | None = None
        # Changes postpone a look, but not beyond this time.
        self._look_by: float | None = None
        replicas.subscribe(self._on_change)

    def migrate(self, placement: Placement, address: str) -> MigrateResponse:
        """Moves one live stream. address: the target, as in scheduler_addresses; empty: the policy chooses.

        Raises InvalidRequest if there is no such replica, NotMigrated if none can continue it exactly.
        """
        replicas = self._replicas.replicas
        known = [replica.address for replica in replicas]
        if address and address not in known:
            raise InvalidRequest(f"replica={address!r}: this router knows {', '.join(known)}")
        here = next((replica for replica in replicas if replica.session is placement.session), None)
        if placement.session is None or here is None:
            raise NotMigrated("no replica has the request now: it continues at the first that takes it")
        if not placement.can_leave:
            raise NotMigrated("the request is complete, or its output is too long for a message to another replica")
        if address == here.address:
            raise NotMigrated(f"the request is at {address} already")
        others = [each for each in replicas if each is not here and address in ("", each.address)]
        there = self._replicas.choose_ready(others, placement.stream.request.routing_hints, placement.fingerprint)
        if there is None:
            raise NotMigrated(
                f"{address or 'no other replica'} is not ready to continue exactly as {here.address} does (fingerprint "
                f"{placement.fingerprint[:12]}): {self._replicas.describe()}"
            )
        self._move(placement, there, "asked")
        return MigrateResponse(
            moved_from=here.address,
            moved_to=there.address,
            num_output_tokens=placement.stream.num_output_tokens,
        )

    def _move(self, placement: Placement, there: Replica, cause: str) -> None:
        assert there.session is not None
        placement.migrate_to(there.session, cause)
        self._metrics.resubmissions.inc()
        self._metrics.migrations.labels(cause).inc()
        stream = placement.stream
        self._metrics.events.note(
            "migrated",
            f"to replica {placement.replica} ({cause}), after {stream.num_output_tokens} output tokens",
            replica=placement.replica,
            request_id=stream.request.request_id,
            tenant=stream.request.tenant,
        )

    def _on_change(self, replicas: ReplicaSet) -> None:
        if any(map(_should_be_left, replicas.replicas)):
            now = asyncio.get_running_loop().time()
            self._look_by = self._look_by or now + _SETTLED_S
            self._look_after(max(0.0, min(_SETTLE_S, self._look_by - now)))

    def _look_after(self, seconds: float) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._next_look = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._next_look = self._look_by = None
        run_in_slices(self._empty_all())

    def _empty_all(self) -> Iterator[None]:
        num_staying = 0
        for replica in self._replicas.replicas:
            if _should_be_left(replica):
                num_staying += yield from self._empty(replica)
        if num_staying:
            self._look_after(_LOOK_AGAIN_S)

    def _empty(self, replica: Replica) -> Generator[None, None, int]:
        """Moves streams off a replica. Returns how many stay because no other replica can take them."""
        cause = "drain" if replica.draining else "stall" if replica.stalled else "slow"
        others = [each for each in self._replicas.replicas if each is not replica and not each.too_slow]
        num_moved = num_staying = 0
        session = replica.session
        for placement in [] if session is None else self._dispatcher.placements_on(session):
            yield
            # Since the last slice the stream may have left, or the Session ended, which moves its streams anyway.
            if placement.session is not session or replica.session is not session or not placement.can_leave:
                continue
            if not replica.stalled and placement.stream.num_tokens_to_come <= _FEW_TOKENS:
                continue
            hints = placement.stream.request.routing_hints
            there = self._replicas.choose_ready(others, hints, placement.fingerprint)
            if there is None and replica.stalled:
                # A stalled replica is as good as lost: inexact is better than nothing.
                there = self._replicas.choose_ready(others, hints)
            if there is None:
                num_staying += 1
            else:
                self._move(placement, there, cause)
                num_moved += 1
        if num_moved:
            log.warning("%s: moved %d streams to other replicas (%s)", replica.address, num_moved, cause)
        return num_staying


def _should_be_left(replica: Replica) -> bool:
    return replica.draining or replica.stalled or replica.too_slow
