"""The Admin service of a router."""

import grpc.aio

from protos import admin_pb2 as pb
from protos.admin_pb2_grpc import AdminServicer
from router.api.grpc_errors import guarded
from router.api.observer import Observer
from router.api.operator import Operator

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

Context = grpc.aio.ServicerContext


class AdminService(AdminServicer):
    """Replicas that can't be reached are named in the answer; if none answers, the call fails with UNAVAILABLE."""

    def __init__(self, operator: Operator, observer: Observer) -> None:
        self._operator, self._observer = operator, observer

    @guarded
    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        return await self._operator.explain(request.request_id)

    @guarded
    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        return await self._operator.reset_prefix_cache()

    @guarded
    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        return await self._operator.migrate(request.request_id, request.replica)

    @guarded
    async def Observe(self, request: pb.ObserveRequest, context: Context) -> pb.ObserveResponse:
        return await self._observer.observe()

    @guarded
    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        return self._operator.hold(request.replica, request.state)
