"""The Admin service: asks all replicas and combines their answers, and migrates streams."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer, AdminStub
from router.api.grpc_errors import grpc_errors
from router.errors import Forbidden, InvalidRequest, NoReplica, UnknownRequest
from router.replicas.broadcast import ANSWER_TIMEOUT_S, BroadcastTarget, broadcast
from router.replicas.migrations import Migration
from router.security.identity import caller

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

Context = grpc.aio.ServicerContext


class Live(Protocol):
    """Requests that are live at any router."""

    async def migrate(self, request_id: str, address: str) -> Migration:
        """Moves a live stream. request_id: the caller's. address: the target. Raises RequestError."""
        ...

    async def waiting(self, request_id: str) -> pb.RequestTimeline | None:
        """Returns a timeline of a live request of the caller that no replica has; None: there is no such request."""
        ...


class AdminService(AdminServicer):
    """Replicas that can't be reached are named in the answer; if none answers, the call fails with UNAVAILABLE."""

    def __init__(self, replicas: Sequence[BroadcastTarget], live: Live) -> None:
        self._replicas, self._live = replicas, live

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        async with grpc_errors(context, request.request_id):
            return await self._explain(request.request_id)
        raise AssertionError("unreachable")

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        async with grpc_errors(context):
            return await self._reset_prefix_cache()
        raise AssertionError("unreachable")

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        async with grpc_errors(context, request.request_id):
            return await self._migrate(request.request_id, request.replica)
        raise AssertionError("unreachable")

    async def _explain(self, request_id: str) -> pb.ExplainResponse:
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a request")

        scoped_id = caller().scoped_id(request_id)

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

    async def _reset_prefix_cache(self) -> pb.ResetPrefixCacheResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not reset prefix caches, which all share: use one with `admin: true`")

        async def ask(channel: grpc.aio.Channel) -> pb.ResetPrefixCacheResponse:
            return await _stub(channel).ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=ANSWER_TIMEOUT_S)

        answers, unreachable = await broadcast(self._replicas, ask)
        num_blocks = sum(answer.num_blocks for answer in answers)
        return pb.ResetPrefixCacheResponse(num_blocks=num_blocks, unreachable=unreachable)

    async def _migrate(self, request_id: str, replica: str) -> pb.MigrateResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not move requests between replicas: use one with `admin: true`")
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a live request")
        done = await self._live.migrate(request_id, replica)
        return pb.MigrateResponse(
            moved_from=done.moved_from, moved_to=done.moved_to, num_output_tokens=done.num_output_tokens
        )


def _stub(channel: grpc.aio.Channel) -> Any:
    """Returns a stub, as Any: the generated types are those of the synchronous one."""
    return AdminStub(channel)
