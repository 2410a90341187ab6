"""vLLM's services on the router: the whole cluster as one engine."""

import contextlib
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from configs.options import Options
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos import vllm_pb2 as vllm
from protos.vllm_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)
from router.api.compat.vllm.convert import Joined, Replies, generate_request
from router.api.compat.vllm.pauses import is_paused, pause
from router.api.grpc_errors import grpc_errors
from router.errors import Forbidden, InvalidRequest, NoReplica
from router.intake.intake import Intake
from router.replicas.broadcast import ANSWER_TIMEOUT_S
from router.replicas.replica_set import ReplicaSet
from router.request.checks import check_request_id
from router.security.identity import caller
from router.streams.outbox import bounded_reading
from runtime.wire import KV_EVENTS_WAITING, octavo_version

Context = grpc.aio.ServicerContext

# Bytes of an answer that comes whole; gRPC serializes it on the event loop.
_ANSWER_BYTES = 16 * 2**20

_ADAPTERS = "no adapters are served"
_WEIGHTS = "weights are read when a worker starts: start replicas with other ones"
# Why a call does nothing.
_NOT_HERE = {
    "Shutdown": "end the processes of the cluster, or send the router SIGTERM",
    "LoadLora": _ADAPTERS,
    "UnloadLora": _ADAPTERS,
    "Sleep": "end the replica instead, its streams move to others",
    "WakeUp": "nothing sleeps",
    "InitWeightTransferEngine": _WEIGHTS,
    "StartWeightUpdate": _WEIGHTS,
    "StartDraftWeightUpdate": _WEIGHTS,
    "UpdateWeights": _WEIGHTS,
    "FinishWeightUpdate": _WEIGHTS,
    "UpdateWeightVersion": _WEIGHTS,
    "GetWeightVersion": "weights have no versions: octavo.v1.Inference/GetModel tells a fingerprint",
}


_PAUSE_MODES = {
    vllm.PAUSE_MODE_UNSPECIFIED: wire.PAUSE_MODE_ABORT,
    vllm.PAUSE_MODE_ABORT: wire.PAUSE_MODE_ABORT,
    vllm.PAUSE_MODE_WAIT: wire.PAUSE_MODE_WAIT,
    vllm.PAUSE_MODE_KEEP: wire.PAUSE_MODE_KEEP,
}


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    """Registers both services and returns their full names."""
    add_InferenceServicer_to_server(InferenceService(intake), server)
    add_ControlServicer_to_server(ControlService(intake, replicas, options), server)
    return [service.full_name for service in vllm.DESCRIPTOR.services_by_name.values()]


class InferenceService(InferenceServicer):
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> vllm.GenerateResponse:
        # A client's message may be large: it is dropped as soon as it is converted, for the stream may last.
        asked = [request]
        del request
        async with grpc_errors(context, asked[0].request_id):
            if asked[0].sampling.num_sequences > 1:
                raise InvalidRequest(
                    f"sampling.num_sequences={asked[0].sampling.num_sequences}: Generate answers with one sequence, "
                    "GenerateStream with any number"
                )
            whole, room = Joined(), self._intake.answers.begin((), 0, _ANSWER_BYTES, is_message=True)
            async with contextlib.aclosing(self._replies(asked, context)) as replies:
                with contextlib.closing(room):
                    async for reply in replies:
                        room.grow(reply.ByteSize())
                        whole.add(reply)
                    return whole.message()
        raise AssertionError("unreachable")

    async def GenerateStream(self, request: vllm.GenerateRequest, context: Context) -> None:
        asked = [request]
        del request
        async with (
            grpc_errors(context, asked[0].request_id),
            contextlib.aclosing(self._replies(asked, context)) as replies,
        ):
            async for reply in replies:
                await context.write(reply)

    async def _replies(
        self, asked: list[vllm.GenerateRequest], context: Context
    ) -> AsyncGenerator[vllm.GenerateResponse, None]:
        """asked: a request alone, which is taken out. Raises RequestError."""
        request = asked.pop()
        message = generate_request(request, request.request_id or uuid.uuid4().hex, self._intake.model.default_sampling)
        replies = Replies(request.response)
        del request
        opening = self._intake.open(message, context.time_remaining())
        del message
        async with opening as stream:
            with bounded_reading(stream.outbox):
                while events := await stream.outbox.take():
                    for event in events:
                        if (reply := replies.take(event)) is not None:
                            yield reply


class ControlService(ControlServicer):
    def __init__(self, intake: Intake, replicas: ReplicaSet, options: Options) -> None:
        self._intake, self._replicas, self._options = intake, replicas, options
        self._instance_id = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        for call, instead in _NOT_HERE.items():
            setattr(self, call, _unimplemented(call, instead))

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.ServerInfo:
        async with grpc_errors(context):
            model = self._intake.model
            sessions = [each.session for each in self._replicas.replicas if each.session is not None]
            return vllm.ServerInfo(
                engine_version=f"octavo-{octavo_version()}",
                api_version="0.33",
                instance_id=self._instance_id,
                parallelism=vllm.ParallelismInfo(data_parallel_size=1),
                max_model_len=model.max_model_len,
                kv_block_size=model.block_size,
                total_kv_blocks=sum(session.load.num_blocks for session in sessions),
                max_running_requests=sum(session.welcome.max_num_seqs for session in sessions),
            )
        raise AssertionError("unreachable")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.ModelInfo:
        async with grpc_errors(context):
            model: pb.ModelInfo = self._intake.model
            return vllm.ModelInfo(
                model_id=model.name,
                served_model_name=model.name,
                supports_text_input=True,
                supports_token_ids_input=True,
            )
        raise AssertionError("unreachable")

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Passes over ids that are not live: a request may end while it is aborted."""
        for request_id in dict.fromkeys(request.request_ids):
            # An impossible id is not live: nobody else is asked for it.
            with contextlib.suppress(NoReplica, InvalidRequest):
                check_request_id(request_id)
                await self._intake.live.cancel(request_id)
        return vllm.AbortResponse()

    async def ListLoras(self, request: vllm.ListLorasRequest, context: Context) -> vllm.ListLorasResponse:
        return vllm.ListLorasResponse()

    async def GetKvEventSources(
        self, request: vllm.GetKvEventSourcesRequest, context: Context
    ) -> vllm.GetKvEventSourcesResponse:
        return vllm.GetKvEventSourcesResponse(sources=_kv_event_sources(self._options))

    async def PauseGeneration(
        self, request: vllm.PauseGenerationRequest, context: Context
    ) -> vllm.PauseGenerationResponse:
        async with grpc_errors(context):
            _check_admin("pause generation")
            if request.mode not in _PAUSE_MODES:
                raise InvalidRequest(f"mode={request.mode}: it must be one of {', '.join(vllm.PauseMode.keys())}")
            clear_cache = request.clear_cache if request.HasField("clear_cache") else True
            await pause(
                self._replicas.replicas,
                _PAUSE_MODES[request.mode],
                clear_cache=clear_cache,
                seconds=context.time_remaining(),
            )
        return vllm.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: vllm.ResumeGenerationRequest, context: Context
    ) -> vllm.ResumeGenerationResponse:
        async with grpc_errors(context):
            _check_admin("resume generation")
            await pause(self._replicas.replicas, wire.PAUSE_MODE_NONE, seconds=ANSWER_TIMEOUT_S)
        return vllm.ResumeGenerationResponse()

    async def IsPaused(self, request: vllm.IsPausedRequest, context: Context) -> vllm.IsPausedResponse:
        async with grpc_errors(context):
            return vllm.IsPausedResponse(paused=await is_paused(self._replicas.replicas))
        raise AssertionError("unreachable")

    async def IsSleeping(self, request: vllm.IsSleepingRequest, context: Context) -> vllm.IsSleepingResponse:
        return vllm.IsSleepingResponse()


def _check_admin(what: str) -> None:
    """Raises Forbidden."""
    if not caller().is_admin:
        raise Forbidden(f"this API key may not {what}, which all share: use one with `admin: true`")


def _kv_event_sources(options: Options) -> list[vllm.KvEventSource]:
    """The publishers of all replicas (scheduler/sessions/kv_events/publisher.py)."""
    if not options.kv_events_endpoint:
        return []
    sources = []
    for replica in range(options.data_parallel_size):
        endpoint, replay = options.kv_events_endpoints(replica)
        sources.append(
            vllm.KvEventSource(
                transport="zmq",
                endpoint=endpoint,
                topic=options.kv_events_topic,
                replay_endpoint=replay,
                data_parallel_rank=replica,
                encoding="msgpack",
                schema_version=1,
                buffer_steps=options.kv_events_buffer_steps,
                hwm=KV_EVENTS_WAITING,
                max_queue_size=KV_EVENTS_WAITING,
            )
        )
    return sources


def _unimplemented(call: str, instead: str) -> Callable[[vllm.Unread, Any], Awaitable[None]]:
    async def answer(request: vllm.Unread, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call} is not supported: {instead}")

    return answer
