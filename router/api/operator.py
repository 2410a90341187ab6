"""Operators' requests to a router, over gRPC or from the console: it asks all replicas and combines their answers."""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from router.errors import Forbidden, InvalidRequest, NoReplica, UnknownRequest
from router.intake.live import LiveRequests
from router.replicas.broadcast import ANSWER_TIMEOUT_S, broadcast
from router.replicas.replica import Hold, Replica
from router.security.identity import caller

_HOLDS = {
    pb.HOLD_STATE_NONE: Hold.NONE,
    pb.HOLD_STATE_PAUSED: Hold.PAUSED,
    pb.HOLD_STATE_DRAINED: Hold.DRAINED,
}
_STATES = {hold: state for state, hold in _HOLDS.items()}


class Operator:
    """Replicas that can't be reached are named in the answer; if none answers, NoReplica is raised.

    Every method acts for the caller (security.identity) and raises RequestError.
    """

    def __init__(self, replicas: Sequence[Replica], live: LiveRequests) -> None:
        self._replicas, self._live = replicas, live

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """request_id: the caller's; an admin may name another tenant's request as TENANT/ID."""
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a request")
        scoped_id = caller().named_id(request_id)

        async def ask(channel: grpc.aio.Channel) -> pb.ExplainResponse:
            try:
                return await _stub(channel).Explain(pb.ExplainRequest(request_id=scoped_id), timeout=ANSWER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return pb.ExplainResponse()
                raise

        failure = None
        try:
            answers, unreachable = await broadcast(self._replicas, ask)
        except NoReplica as error:
            answers, unreachable, failure = [], [str(error)], error
        timelines = [timeline for answer in answers for timeline in answer.timelines]
        if not timelines and (waiting := await self._live.waiting(request_id)) is not None:
            timelines = [waiting]
        if not timelines:
            if failure is not None:
                raise failure
            also = f"; not asked: {'; '.join(unreachable)}" if unreachable else ""
            raise UnknownRequest(
                f"request_id={request_id!r}: no replica knows it; each keeps its live requests and the latest that "
                f"have finished since it started{also}"
            )
        for timeline in timelines:
            timeline.request_id = request_id
        # All were asked at about the same moment: the timeline with the largest `now` is the oldest.
        timelines.sort(key=lambda timeline: timeline.now, reverse=True)
        return pb.ExplainResponse(timelines=timelines, unreachable=unreachable)

    async def reset_prefix_cache(self) -> pb.ResetPrefixCacheResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not reset prefix caches, which all share: use one with `admin: true`")

        async def ask(channel: grpc.aio.Channel) -> pb.ResetPrefixCacheResponse:
            return await _stub(channel).ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=ANSWER_TIMEOUT_S)

        answers, unreachable = await broadcast(self._replicas, ask)
        num_blocks = sum(answer.num_blocks for answer in answers)
        return pb.ResetPrefixCacheResponse(num_blocks=num_blocks, unreachable=unreachable)

    async def migrate(self, request_id: str, replica: str) -> pb.MigrateResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not move requests between replicas: use one with `admin: true`")
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a live request")
        return await self._live.migrate(request_id, replica)

    def hold(self, address: str, state: pb.HoldState) -> pb.HoldResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not hold replicas back: use one with `admin: true`")
        found = next((each for each in self._replicas if each.address == address), None)
        if found is None:
            known = ", ".join(each.address for each in self._replicas)
            raise InvalidRequest(f"replica={address!r}: this router knows {known}")
        if state not in _HOLDS:
            raise InvalidRequest(f"state={state}: it must be one of {', '.join(pb.HoldState.keys())}")
        before = found.hold
        found.set_hold(_HOLDS[state])
        return pb.HoldResponse(
            before=_STATES[before], num_streams=0 if found.session is None else found.session.num_groups
        )


def _stub(channel: grpc.aio.Channel) -> Any:
    """Returns a stub, as Any: the generated types are those of the synchronous one."""
    return AdminStub(channel)
