"""The VllmEngine service: converts its messages for the intake."""

import contextlib
import time
import uuid
from typing import Any, NoReturn

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server

from configs.options import Options
from router.api.compat.engine_answers import (
    health_fields,
    load_fields,
    loads_fields,
    model_fields,
    write_replies,
)
from router.api.compat.kv_relay.relay import KvRelay
from router.api.compat.tokenizer_archive import TokenizerArchive
from router.api.compat.vllm_engine.convert import Replies, generate_request
from router.api.compat.vllm_engine.kv_events import event_batch
from router.api.grpc_errors import grpc_errors
from router.errors import Forbidden, InvalidRequest, NoReplica
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.request.checks import check_request_id
from router.security.identity import caller
from router.streams.outbox import bounded_write

Context = grpc.aio.ServicerContext


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> str:
    """Registers the service and returns its full name."""
    add_VllmEngineServicer_to_server(VllmEngineService(intake, replicas, KvRelay(options)), server)
    return vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmEngineService(VllmEngineServicer):
    """The whole cluster as one engine of one data-parallel rank: the router balances, and moves streams that a replica
    loses."""

    def __init__(self, intake: Intake, replicas: ReplicaSet, relay: KvRelay) -> None:
        self._intake, self._replicas, self._relay = intake, replicas, relay
        self._started = time.monotonic()
        self._last_request = 0.0
        self._archive = TokenizerArchive()

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        self._last_request = time.time()
        request_id = request.request_id or uuid.uuid4().hex
        async with grpc_errors(context, request_id):
            replies = Replies(stream=request.stream)
            opening = self._intake.open(generate_request(request, request_id), context.time_remaining())
            # It may be large, and the stream may last.
            del request
            async with opening as stream:
                await write_replies(stream, replies.take, context)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Passes over ids that are not live: a request may end while it is aborted."""
        for request_id in dict.fromkeys(request.request_ids):
            # An impossible id is not live: nobody else is asked for it.
            with contextlib.suppress(NoReplica, InvalidRequest):
                check_request_id(request_id)
                await self._intake.live.cancel(request_id)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        return vllm.HealthCheckResponse(**health_fields(self._intake, self._replicas))

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        async with grpc_errors(context):
            return vllm.GetModelInfoResponse(**model_fields(self._intake))
        raise AssertionError("unreachable")

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        async with grpc_errors(context):
            model = self._intake.model
            return vllm.GetServerInfoResponse(
                active_requests=self._intake.num_streams,
                last_receive_timestamp=self._last_request,
                uptime_seconds=time.monotonic() - self._started,
                server_type="octavo",
                data_parallel_size=1,
                block_size=model.block_size,
                model_dtype=model.dtype,
            )
        raise AssertionError("unreachable")

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        async with grpc_errors(context):
            load = vllm.SchedulerLoad(**load_fields(self._intake, self._replicas))
            rank = request.dp_rank if request.HasField("dp_rank") else None
            return vllm.GetLoadsResponse(**loads_fields(load, rank))
        raise AssertionError("unreachable")

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        async with grpc_errors(context):
            for data, sha256 in await self._archive.chunks(self._intake.tokenizer.tokenizer.directory):
                with bounded_write():
                    await context.write(common.GetTokenizerChunk(data=data, sha256=sha256))

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "Embed", "no embedding model is served")

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "FlushCache", "call octavo.v1.Admin/ResetPrefixCache")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "StartProfile", "profile a worker's process instead")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> NoReturn:
        await _unimplemented(context, "StopProfile", "profile a worker's process instead")

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        if not self._relay.is_there:
            why = "the schedulers publish nothing; set kv_events_endpoint, and kv_events_replay_endpoint"
            await _unimplemented(context, "SubscribeKvEvents", why)
        async with grpc_errors(context):
            if not caller().is_admin:
                raise Forbidden(
                    "KV events hold the token ids of all prompts: this API key may not read them; use one with "
                    "`admin: true`"
                )
            async with contextlib.aclosing(self._relay.batches(request.start_sequence_number)) as batches:
                async for batch in batches:
                    with bounded_write():
                        await context.write(event_batch(batch))


async def _unimplemented(context: Any, call: str, instead: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call} is not supported: {instead}")
    raise AssertionError("unreachable")
