"""SGLang's service on the router: the whole cluster as one engine of one data-parallel rank."""

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from protos import sglang_pb2 as sglang
from protos.sglang_pb2_grpc import SglangSchedulerServicer, add_SglangSchedulerServicer_to_server
from router.api.compat.engine_answers import (
    health_fields,
    load_fields,
    loads_fields,
    model_fields,
    write_replies,
)
from router.api.compat.sglang.convert import Replies, generate_request
from router.api.compat.tokenizer_archive import TokenizerArchive
from router.api.grpc_errors import grpc_errors
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.streams.outbox import bounded_write
from runtime.wire import octavo_version

Context = grpc.aio.ServicerContext

_ADAPTERS = "no adapters are served"
_PROFILE = "profile a worker's process instead"
# Why a call does nothing.
_NOT_HERE = {
    "Embed": "no embedding model is served",
    "FlushCache": "call octavo.v1.Admin/ResetPrefixCache",
    "StartProfile": _PROFILE,
    "StopProfile": _PROFILE,
    "SubscribeKvEvents": "read kv_events_endpoint, or leave prefixes to routing_policy",
    "LoadLoRAAdapter": _ADAPTERS,
    "UnloadLoRAAdapter": _ADAPTERS,
    "ListLoadedLoRAAdapters": _ADAPTERS,
}


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet) -> str:
    """Registers the service and returns its full name."""
    add_SglangSchedulerServicer_to_server(SglangService(intake, replicas), server)
    return sglang.DESCRIPTOR.services_by_name["SglangScheduler"].full_name


class SglangService(SglangSchedulerServicer):
    """Streams move when a replica is lost, as all streams of the router do."""

    def __init__(self, intake: Intake, replicas: ReplicaSet) -> None:
        self._intake, self._replicas = intake, replicas
        self._started = time.monotonic()
        self._last_request = 0.0
        self._archive = TokenizerArchive()
        for call, instead in _NOT_HERE.items():
            setattr(self, call, _unimplemented(call, instead))

    async def Generate(self, request: sglang.GenerateRequest, context: Context) -> None:
        self._last_request = time.time()
        request_id = request.request_id or uuid.uuid4().hex
        async with grpc_errors(context, request_id):
            replies = Replies(request, request_id)
            opening = self._intake.open(generate_request(request, request_id), context.time_remaining())
            # It may be large, and the stream may last.
            del request
            async with opening as stream:
                await write_replies(stream, replies.take, context)

    async def Abort(self, request: sglang.AbortRequest, context: Context) -> sglang.AbortResponse:
        async with grpc_errors(context, request.request_id):
            if (await self._intake.live.cancel(request.request_id)).cancelled:
                return sglang.AbortResponse(success=True)
        return sglang.AbortResponse(message=f"request_id={request.request_id!r}: no live request has it")

    async def HealthCheck(self, request: sglang.HealthCheckRequest, context: Context) -> sglang.HealthCheckResponse:
        return sglang.HealthCheckResponse(**health_fields(self._intake, self._replicas))

    async def GetModelInfo(self, request: sglang.GetModelInfoRequest, context: Context) -> sglang.GetModelInfoResponse:
        async with grpc_errors(context):
            return sglang.GetModelInfoResponse(**model_fields(self._intake))
        raise AssertionError("unreachable")

    async def GetServerInfo(
        self, request: sglang.GetServerInfoRequest, context: Context
    ) -> sglang.GetServerInfoResponse:
        async with grpc_errors(context):
            model = self._intake.model
            info = sglang.GetServerInfoResponse(
                active_requests=self._intake.num_streams,
                last_receive_timestamp=self._last_request,
                uptime_seconds=time.monotonic() - self._started,
                sglang_version=f"octavo-{octavo_version()}",
                server_type="grpc",
                max_total_num_tokens=self._load().max_total_num_tokens,
            )
            # What routers look for.
            info.server_args.update(
                {
                    "model_path": model.name,
                    "served_model_name": model.name,
                    "dp_size": 1,
                    "tp_size": 1,
                    "page_size": model.block_size,
                    "context_length": model.max_model_len,
                }
            )
            return info
        raise AssertionError("unreachable")

    async def GetLoads(self, request: sglang.GetLoadsRequest, context: Context) -> sglang.GetLoadsResponse:
        async with grpc_errors(context):
            rank = request.dp_rank if request.HasField("dp_rank") else None
            return sglang.GetLoadsResponse(**loads_fields(self._load(), rank))
        raise AssertionError("unreachable")

    async def GetTokenizer(self, request: sglang.GetTokenizerRequest, context: Context) -> None:
        async with grpc_errors(context):
            for data, sha256 in await self._archive.chunks(self._intake.tokenizer.tokenizer.directory):
                with bounded_write():
                    await context.write(sglang.TokenizerChunk(data=data, sha256=sha256))

    def _load(self) -> sglang.SchedulerLoad:
        return sglang.SchedulerLoad(**load_fields(self._intake, self._replicas))


def _unimplemented(call: str, instead: str) -> Callable[[sglang.Unread, Any], Awaitable[None]]:
    async def answer(request: sglang.Unread, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call} is not supported: {instead}")

    return answer
