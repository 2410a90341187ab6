"""Requests that are live, at this router process or at another one over the same schedulers: cancels and moves them."""

import time
from collections.abc import Sequence

from protos.admin_pb2 import MigrateResponse, RequestTimeline, TimelineEntry
from protos.inference_pb2 import CancelResponse
from router.errors import NoReplica, UnknownRequest
from router.replicas.broadcast import broadcast_cancel, newest
from router.replicas.peers import Peers
from router.replicas.replica import Replica
from router.security.identity import caller
from router.streams.migrations import Migrations
from router.streams.registry import StreamRegistry
from router.streams.states import StreamState


class LiveRequests:
    def __init__(
        self, registry: StreamRegistry, migrations: Migrations, replicas: Sequence[Replica], peers: Peers
    ) -> None:
        self._registry, self._migrations, self._replicas, self._peers = registry, migrations, replicas, peers

    async def cancel(self, request_id: str) -> CancelResponse:
        """Ends all attempts of a request of the caller, at any router: one that is here may be stale, because its
        client has lost the way here and has resumed elsewhere. Returns the newest attempt, which counts as the request.

        Raises NoReplica if the request is not known here and no replica answers.
        """
        scoped_id = caller().scoped_id(request_id)
        found = self.cancel_here(scoped_id)
        if found.cancelled and self._peers.are_none:
            return found
        at_peers, is_all = await self._peers.cancel(scoped_id)
        found = newest((found, at_peers))
        if found.cancelled and is_all:
            return found
        # A router that cannot be asked has it, or one of an earlier version.
        try:
            return newest((found, await broadcast_cancel(self._replicas, scoped_id)))
        except NoReplica:
            if not found.cancelled:
                raise
            return found

    async def migrate(self, request_id: str, address: str) -> MigrateResponse:
        """Moves a live stream of the caller, or one that an admin names as TENANT/ID. address: the target, as in
        scheduler_addresses; empty: the policy chooses.

        Raises UnknownRequest, InvalidRequest if there is no such replica, NotMigrated if none can continue it exactly.
        """
        scoped_id = caller().named_id(request_id)
        here = self.attempt_here(scoped_id)
        if here is None or not self._peers.are_none:
            moved = await self._peers.migrate(scoped_id, address, newer_than=here)
            if moved is not None:
                return moved
        if here is None:
            raise UnknownRequest(f"request_id={request_id!r} is not live at this router, nor at one that it can ask")
        return self.migrate_here(scoped_id, address)

    async def waiting(self, request_id: str) -> RequestTimeline | None:
        """Returns a timeline of a live request that no replica has; None: there is no such request.

        request_id: as in `migrate`.
        """
        scoped_id = caller().named_id(request_id)
        here = self.attempt_here(scoped_id)
        if here is None or not self._peers.are_none:
            for _, found in await self._peers.find_live(scoped_id, newer_than=here):
                return found.waiting if found.HasField("waiting") else None
        return self.waiting_here(scoped_id)

    # --- At this process, by Request.scoped_id

    def attempt_here(self, scoped_id: str) -> int | None:
        """Returns the live attempt; None: there is none."""
        stream = self._registry.find(scoped_id)
        return None if stream is None else stream.request.attempt

    def cancel_here(self, scoped_id: str) -> CancelResponse:
        return self._registry.cancel(scoped_id)

    def migrate_here(self, scoped_id: str, address: str) -> MigrateResponse:
        """Raises UnknownRequest, InvalidRequest, NotMigrated."""
        stream = self._registry.find(scoped_id)
        if stream is None:
            raise UnknownRequest(f"request_id={scoped_id.rpartition('/')[2]!r} is not live here")
        return self._migrations.migrate(stream.placement, address)

    def waiting_here(self, scoped_id: str) -> RequestTimeline | None:
        stream = self._registry.find(scoped_id)
        if stream is None or stream.placement.state not in (StreamState.WAITING, StreamState.PARKED):
            return None
        request = stream.request
        queued = TimelineEntry(
            moment="queued",
            num_tokens=len(request.prompt_token_ids),
            reason=f"no replica has it: it waits at its router, with {stream.num_output_tokens} output tokens",
        )
        return RequestTimeline(
            request_id=request.request_id, replica_id="router", entries=[queued], now=time.monotonic() - request.arrival
        )
