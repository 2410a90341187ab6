"""vLLM's own gRPC services, vllm.Inference and vllm.Control: the whole cluster as one engine."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from configs.options import Options
from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos.scheduler_pb2_grpc import SchedulerStub
from router.api.grpc_errors import grpc_errors, guarded
from router.compat.engines import Context, abort_all, refuse_calls, write_replies
from router.compat.protos import vllm_pb2 as vllm
from router.compat.protos.vllm_pb2_grpc import (
    ControlServicer,
    InferenceServicer,
    add_ControlServicer_to_server,
    add_InferenceServicer_to_server,
)
from router.compat.vllm_messages import Joined, Replies, generate_request
from router.errors import Forbidden, InvalidRequest, NoReplica
from router.intake.intake import Intake
from router.replicas.broadcast import ANSWER_TIMEOUT_S, broadcast
from router.replicas.replica import Replica
from router.replicas.replica_set import ReplicaSet
from router.security.identity import caller
from router.streams.stream import Stream
from runtime.wire import KV_EVENTS_WAITING, octavo_version

# Bytes of an answer that comes whole; gRPC serializes it on the event loop.
_ANSWER_BYTES = 16 * 2**20

_ADAPTERS = "no adapters are served"
_WEIGHTS = "weights are read when a worker starts: start replicas with other ones"
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
# A replica's next message, which tells its state to this router, comes in milliseconds.
_TOLD_WITHIN_S = 2.0
_LOOK_S = 0.005
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
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

    @guarded
    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> vllm.GenerateResponse:
        if request.sampling.num_sequences > 1:
            raise InvalidRequest(
                f"sampling.num_sequences={request.sampling.num_sequences}: Generate answers with one sequence, "
                "GenerateStream with any number"
            )
        whole, room = Joined(), self._intake.answers.begin((), 0, _ANSWER_BYTES, is_message=True)

        async def add(reply: vllm.GenerateResponse) -> None:
            room.grow(reply.ByteSize())
            whole.add(reply)

        with contextlib.closing(room):
            replies, opening = self._asked(request, context)
            # It may be large, and the stream may last.
            del request
            async with opening as stream:
                await write_replies(stream, replies.take, add)
            return whole.message()

    async def GenerateStream(self, request: vllm.GenerateRequest, context: Context) -> None:
        async with grpc_errors(context, request.request_id):
            replies, opening = self._asked(request, context)
            del request
            async with opening as stream:
                await write_replies(stream, replies.take, context.write)

    def _asked(
        self, request: vllm.GenerateRequest, context: Context
    ) -> tuple[Replies, contextlib.AbstractAsyncContextManager[Stream]]:
        """Raises InvalidRequest."""
        message = generate_request(request, request.request_id or uuid.uuid4().hex, self._intake.model.default_sampling)
        return Replies(request.response), self._intake.open(message, context.time_remaining())


class ControlService(ControlServicer):
    def __init__(self, intake: Intake, replicas: ReplicaSet, options: Options) -> None:
        self._intake, self._replicas, self._options = intake, replicas, options
        self._instance_id = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        refuse_calls(self, _NOT_HERE)

    @guarded
    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.ServerInfo:
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

    @guarded
    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.ModelInfo:
        model: pb.ModelInfo = self._intake.model
        return vllm.ModelInfo(
            model_id=model.name,
            served_model_name=model.name,
            supports_text_input=True,
            supports_token_ids_input=True,
        )

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        await abort_all(self._intake, request.request_ids)
        return vllm.AbortResponse()

    async def ListLoras(self, request: vllm.ListLorasRequest, context: Context) -> vllm.ListLorasResponse:
        return vllm.ListLorasResponse()

    async def GetKvEventSources(
        self, request: vllm.GetKvEventSourcesRequest, context: Context
    ) -> vllm.GetKvEventSourcesResponse:
        return vllm.GetKvEventSourcesResponse(sources=_kv_event_sources(self._options))

    @guarded
    async def PauseGeneration(
        self, request: vllm.PauseGenerationRequest, context: Context
    ) -> vllm.PauseGenerationResponse:
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

    @guarded
    async def ResumeGeneration(
        self, request: vllm.ResumeGenerationRequest, context: Context
    ) -> vllm.ResumeGenerationResponse:
        _check_admin("resume generation")
        await pause(self._replicas.replicas, wire.PAUSE_MODE_NONE, seconds=ANSWER_TIMEOUT_S)
        return vllm.ResumeGenerationResponse()

    @guarded
    async def IsPaused(self, request: vllm.IsPausedRequest, context: Context) -> vllm.IsPausedResponse:
        return vllm.IsPausedResponse(paused=await is_paused(self._replicas.replicas))

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


# --- Pauses of all replicas, for all routers


async def pause(
    replicas: Sequence[Replica], mode: wire.PauseMode, *, clear_cache: bool = False, seconds: float | None = None
) -> list[wire.PauseMode]:
    """Returns the mode of each replica, once all are in it and this router has been told.

    mode: UNSPECIFIED only asks. seconds: the time for it; None: no limit, because requests may take long to finish.
    Raises InvalidRequest, and NoReplica if one does not answer: the others are paused, or go on, even so.
    """
    refusals: list[str] = []

    async def ask(channel: grpc.aio.Channel) -> wire.PauseMode:
        # The generated stub's types are those of the synchronous one.
        stub: Any = SchedulerStub(channel)
        try:
            answer = await stub.Pause(wire.PauseRequest(mode=mode, clear_cache=clear_cache), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                refusals.append(error.details() or "")
            raise
        return answer.mode

    try:
        modes, unreachable = await broadcast(replicas, ask)
    except NoReplica:
        if refusals:
            raise InvalidRequest(refusals[0]) from None
        raise
    if unreachable:
        raise NoReplica(f"{'; '.join(unreachable)}: the other {len(modes)} replicas have done it; try again")
    if mode != wire.PAUSE_MODE_UNSPECIFIED:
        await _until_told(replicas, mode)
    return modes


async def is_paused(replicas: Sequence[Replica]) -> bool:
    """True if any replica is paused. Raises NoReplica if one does not answer."""
    modes = await pause(replicas, wire.PAUSE_MODE_UNSPECIFIED, seconds=ANSWER_TIMEOUT_S)
    return any(mode != wire.PAUSE_MODE_NONE for mode in modes)


async def _until_told(replicas: Sequence[Replica], mode: wire.PauseMode) -> None:
    """Waits for the loads that say so: a request right after a resume must find a replica."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TOLD_WITHIN_S):
            # A load is no event: replicas tell their watchers only those changes that matter to routing.
            while any(each.session is not None and each.session.load.paused != mode for each in replicas):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
