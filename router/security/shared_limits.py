"""Has a scheduler count what API keys use, so that rate limits hold over all processes of all routers.

Each process judges requests by its own buckets, without a call. Several times a second it tells one scheduler what its
keys have used, and learns what is left of all keys. So a limit can be exceeded by what other processes accept within
one interval.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio

from protos.scheduler_pb2 import CountRequest, CountResponse
from protos.scheduler_pb2_grpc import SchedulerStub
from router.security.keys import Keys

if TYPE_CHECKING:
    # A replica's scheduler counts for the keys, which are below replicas.
    from router.replicas.replica import Replica

log = logging.getLogger("octavo.router.security")

INTERVAL_S = 0.1
_ANSWER_S = 1.0


class SharedLimits:
    """All routers ask the first replica in their common order, so that one counts; if it is away, the next one."""

    def __init__(self, keys: Keys, replicas: Sequence["Replica"]) -> None:
        self._keys, self._replicas = keys, replicas
        self._is_counted = True

    async def run(self) -> None:
        """Counts until the task is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.count()

    async def count(self) -> None:
        """Tells what was used here, and takes over what is left."""
        identities = {each.key_digest: each for each in self._keys.limited()}
        if not identities:
            return
        used = [(digest, each.limits) for digest, each in identities.items() if each.limits.are_used]
        request = CountRequest(keys=[limits.take_use(digest) for digest, limits in used])
        answer = await self._ask(request)
        if answer is None:
            for use in request.keys:
                identities[use.key].limits.give_back(use)
            return
        for left in answer.keys:
            if (found := identities.get(left.key)) is not None:
                found.limits.set_left(left)

    async def _ask(self, request: CountRequest) -> CountResponse | None:
        """Returns None if no replica answers."""
        failures = []
        for replica in self._replicas:
            if replica.channel is None or replica.session is None:
                continue
            # The generated stub's types are those of the synchronous one.
            stub: Any = SchedulerStub(replica.channel)
            try:
                answer = await stub.Count(request, timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as error:
                failures.append(f"{replica.address}: {error.code().name}, {error.details()}")
                continue
            self._is_counted = True
            return answer
        if self._is_counted and failures:
            self._is_counted = False
            log.warning("rate limits of API keys hold for each router process alone: %s", "; ".join(failures))
        return None
