"""The Admin service of a router: it asks all of its replicas and puts their answers together, and moves streams."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer, AdminStub
from router.answering import answering
from router.errors import Forbidden, InvalidRequest, NoReplica, UnknownRequest
from router.migrations import Migration
from router.security.identity import caller

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name
# A scheduler answers between two steps; one that takes longer counts as unreachable.
_TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext
Answer = TypeVar("Answer")


class Asked(Protocol):
    """A replica."""

    address: str
    # None until something has been tried.
    channel: grpc.aio.Channel | None


class Migrates(Protocol):
    """router.migrations."""

    def migrate(self, request_id: str, scoped_id: str, address: str) -> Migration: ...


class AdminService(AdminServicer):
    """Replicas that can't be reached are named in the answer; if none answers, the call fails with UNAVAILABLE."""

    def __init__(self, replicas: Sequence[Asked], migrations: Migrates) -> None:
        self._replicas = replicas
        self._migrations = migrations

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        async with answering(context, request.request_id):
            return await self._explain(request.request_id)
        raise AssertionError("unreachable")

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        async with answering(context):
            return await self._reset_prefix_cache()
        raise AssertionError("unreachable")

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        async with answering(context, request.request_id):
            return self._migrate(request.request_id, request.replica)
        raise AssertionError("unreachable")

    async def _explain(self, request_id: str) -> pb.ExplainResponse:
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a request")

        scoped_id = caller().scoped_id(request_id)

        async def ask(stub: Any) -> pb.ExplainResponse:
            try:
                return await stub.Explain(pb.ExplainRequest(request_id=scoped_id), timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return pb.ExplainResponse()
                raise

        answers, unreachable = await self._ask_all(ask)
        timelines = [timeline for answer in answers for timeline in answer.timelines]
        if not timelines:
            also = f"; not asked: {'; '.join(unreachable)}" if unreachable else ""
            raise UnknownRequest(
                f"request_id={request_id!r}: no replica knows it; each keeps what it has now and the latest that have "
                f"finished since it started{also}"
            )
        for timeline in timelines:
            timeline.request_id = request_id
        # All were asked at about the same moment: what began the longest ago is the oldest.
        timelines.sort(key=lambda timeline: timeline.now, reverse=True)
        return pb.ExplainResponse(timelines=timelines, unreachable=unreachable)

    async def _reset_prefix_cache(self) -> pb.ResetPrefixCacheResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not reset prefix caches, which all share: use one with `admin: true`")

        async def ask(stub: Any) -> pb.ResetPrefixCacheResponse:
            return await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=_TIMEOUT_S)

        answers, unreachable = await self._ask_all(ask)
        num_blocks = sum(answer.num_blocks for answer in answers)
        return pb.ResetPrefixCacheResponse(num_blocks=num_blocks, unreachable=unreachable)

    def _migrate(self, request_id: str, replica: str) -> pb.MigrateResponse:
        if not caller().is_admin:
            raise Forbidden("this API key may not move requests between replicas: use one with `admin: true`")
        if not request_id:
            raise InvalidRequest("request_id is empty: give that of a live request")
        done = self._migrations.migrate(request_id, caller().scoped_id(request_id), replica)
        return pb.MigrateResponse(
            moved_from=done.moved_from, moved_to=done.moved_to, num_output_tokens=done.num_output_tokens
        )

    async def _ask_all(self, ask: Callable[[Any], Awaitable[Answer]]) -> tuple[list[Answer], list[str]]:
        """The answers, and for each replica without one its address and the cause. ask: gets an AdminStub.

        Raises NoReplica if there is no answer at all.
        """

        async def ask_one(replica: Asked) -> Answer | str:
            if replica.channel is None:
                return f"{replica.address}: not connected yet"
            try:
                return await ask(AdminStub(replica.channel))
            except grpc.aio.AioRpcError as error:
                return f"{replica.address}: {error.code().name}, {error.details()}"

        outcomes = await asyncio.gather(*map(ask_one, self._replicas))
        unreachable = [outcome for outcome in outcomes if isinstance(outcome, str)]
        answers = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        if not answers:
            raise NoReplica(f"no replica answers: {'; '.join(unreachable)}; try again in a few seconds")
        return answers, unreachable
