"""Requests that are live, at this router process or at another one over the same schedulers: cancels and moves them."""

import time
from collections.abc import Sequence

from protos.admin_pb2 import RequestTimeline, TimelineEntry
from router.errors import UnknownRequest
from router.replicas.broadcast import BroadcastTarget, broadcast_cancel
from router.replicas.migrations import Migration, Migrations
from router.replicas.peers import Peers
from router.security.identity import caller
from router.streams.registry import StreamRegistry


class LiveRequests:
    def __init__(
        self, registry: StreamRegistry, migrations: Migrations, replicas: Sequence[BroadcastTarget], peers: Peers
    ) -> None:
        self._registry, self._migrations, self._replicas, self._peers = registry, migrations, replicas, peers

    async def cancel(self, request_id: str) -> bool:
        """Ends a live request of the caller, at any router; False if none has this id.

        Raises NoReplica if the request is not known here and no replica answers.
        """
        scoped_id = caller().scoped_id(request_id)
        if self.cancel_here(scoped_id) or await self._peers.cancel(scoped_id):
            return True
        # A router without a place to answer others has it, or one of an earlier version.
        return await broadcast_cancel(self._replicas, scoped_id)

    async def migrate(self, request_id: str, address: str) -> Migration:
        """Moves a live stream of the caller, or one that an admin names as TENANT/ID. address: the target, as in
        scheduler_addresses; empty: the policy chooses.

        Raises UnknownRequest, InvalidRequest if there is no such replica, NotMigrated if none can continue it exactly.
        """
        scoped_id = caller().named_id(request_id)
        if self.is_here(scoped_id):
            return self.migrate_here(scoped_id, address)
        moved = await self._peers.migrate(scoped_id, address)
        if moved is None:
            raise UnknownRequest(f"request_id={request_id!r} is not live at this router, nor at one that it can ask")
        return moved

    async def waiting(self, request_id: str) -> RequestTimeline | None:
        """Returns a timeline of a live request that no replica has; None: there is no such request.

        request_id: as in `migrate`.
        """
        scoped_id = caller().named_id(request_id)
        if self.is_here(scoped_id):
            return self.waiting_here(scoped_id)
        found = await self._peers.find(scoped_id)
        return found[1].waiting if found is not None and found[1].HasField("waiting") else None

    # --- At this process, by Request.scoped_id

    def is_here(self, scoped_id: str) -> bool:
        return self._registry.find(scoped_id) is not None

    def cancel_here(self, scoped_id: str) -> bool:
        return self._registry.cancel(scoped_id)

    def migrate_here(self, scoped_id: str, address: str) -> Migration:
        """Raises UnknownRequest, InvalidRequest, NotMigrated."""
        stream = self._registry.find(scoped_id)
        if stream is None:
            raise UnknownRequest(f"request_id={scoped_id.rpartition('/')[2]!r} is not live here")
        return self._migrations.migrate(stream.placement, address)

    def waiting_here(self, scoped_id: str) -> RequestTimeline | None:
        stream = self._registry.find(scoped_id)
        if stream is None or stream.placement.is_placed:
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
