"""The Admin service of a router."""

from typing import Protocol

import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer
from router.api.grpc_errors import grpc_errors
from router.api.operator import Operator

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

Context = grpc.aio.ServicerContext


class Observes(Protocol):
    """The part of the observer that is asked here."""

    async def observe(self) -> pb.ObserveResponse: ...


class AdminService(AdminServicer):
    """Replicas that can't be reached are named in the answer; if none answers, the call fails with UNAVAILABLE."""

    def __init__(self, operator: Operator, observer: Observes) -> None:
        self._operator, self._observer = operator, observer

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        async with grpc_errors(context, request.request_id):
            return await self._operator.explain(request.request_id)
        raise AssertionError("unreachable")

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        async with grpc_errors(context):
            return await self._operator.reset_prefix_cache()
        raise AssertionError("unreachable")

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        async with grpc_errors(context, request.request_id):
            return await self._operator.migrate(request.request_id, request.replica)
        raise AssertionError("unreachable")

    async def Observe(self, request: pb.ObserveRequest, context: Context) -> pb.ObserveResponse:
        async with grpc_errors(context):
            return await self._observer.observe()
        raise AssertionError("unreachable")

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        async with grpc_errors(context):
            return self._operator.hold(request.replica, request.state)
        raise AssertionError("unreachable")
