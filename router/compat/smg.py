"""`vllm.grpc.engine.VllmEngine`, by which the SMG gateway reaches an engine. Messages: package smg-grpc-proto."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server

from configs.options import Options
from protos import inference_pb2 as pb
from router.api.grpc_errors import grpc_errors, guarded
from router.compat.engines import Context, EngineReplies, EngineService, abort_all, refuse_calls
from router.compat.kv_relay import Batch, Block, Change, KvRelay
from router.compat.sampling import refuse, sampling_of
from router.errors import Forbidden
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.security.identity import caller
from router.streams.outbox import bounded_write

_NO_MEDIA = "images, audio and video are not supported"
_NO_TRANSFER = "KV can't be taken over from another engine"
# Fields of a request that need what is not supported here.
_REFUSED = {
    "mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
    "data_parallel_rank": "this router chooses among its replicas and shows as one rank",
}
_NO_TRUNCATION = {"truncate_prompt_tokens": "prompts are taken whole, so shorten them before they are sent"}
_MEDIUM = "GPU"
# Above the number of events in a batch, so that their ids are their own.
_MOST_EVENTS = 2**12


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    """Registers the service and returns its full name."""
    add_VllmEngineServicer_to_server(VllmEngineService(intake, replicas, KvRelay(options)), server)
    return [vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name]


class VllmEngineService(EngineService, VllmEngineServicer):
    messages = vllm
    tokenizer_chunk = common.GetTokenizerChunk

    def __init__(self, intake: Intake, replicas: ReplicaSet, relay: KvRelay) -> None:
        super().__init__(intake, replicas)
        self._relay = relay
        if not relay.is_there:
            why = "the schedulers publish nothing; set kv_events_endpoint, and kv_events_replay_endpoint"
            refuse_calls(self, {"SubscribeKvEvents": why})

    def message_of(self, request: vllm.GenerateRequest, request_id: str) -> pb.GenerateRequest:
        return generate_request(request, request_id)

    def replies_to(self, request: vllm.GenerateRequest, request_id: str) -> EngineReplies:
        return Replies(stream=request.stream)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        await abort_all(self._intake, request.request_ids)
        return vllm.AbortResponse()

    @guarded
    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
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

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
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


# --- Requests and answers


def generate_request(request: vllm.GenerateRequest, request_id: str) -> pb.GenerateRequest:
    """Takes vLLM's defaults for unset fields, not the model's, which GetModelInfo returns. Raises InvalidRequest."""
    given = request.sampling_params
    refuse(request, _REFUSED)
    refuse(given, _NO_TRUNCATION, "sampling_params.")
    sampling = sampling_of({"sampling_params": given}, fills=True)
    message = pb.GenerateRequest(request_id=request_id, sampling=sampling)
    if request.WhichOneof("input") == "text":
        message.prompt = request.text
    else:
        message.token_ids.ids.extend(request.tokenized.input_ids)
        message.token_ids.SetInParent()
    return message


class Replies(EngineReplies):
    messages = vllm
    finish_reasons: ClassVar[Mapping[int, str]] = {
        pb.FINISH_REASON_STOP: "stop",
        pb.FINISH_REASON_LENGTH: "length",
        pb.FINISH_REASON_REPETITION: "repetition",
        pb.FINISH_REASON_ERROR: "error",
    }
    counts_all = False


# --- Changes of the prefix caches


def event_batch(batch: Batch) -> common.KvEventBatch:
    """Converts a batch. A snapshot's first chunk begins with the end of all that was known."""
    message = common.KvEventBatch(sequence_number=batch.number, timestamp=batch.seconds, dp_rank=0)
    snapshot = batch.snapshot
    if snapshot is not None:
        message.snapshot.CopyFrom(
            common.KvSnapshotChunk(
                index=snapshot.index,
                count=snapshot.count,
                blocks=snapshot.blocks,
                unknown_before=snapshot.unknown_before,
            )
        )
        if snapshot.index == 0:
            message.events.add().cleared.SetInParent()
    for place, run in enumerate(_runs(batch.changes)):
        event = message.events.add()
        if snapshot is None:
            event.event_id = batch.number * _MOST_EVENTS % 2**64 + place
        if isinstance(run[0], Block):
            _store(event.stored, run)
        else:
            removed = event.removed
            removed.block_hashes.extend(map(_signed, run))
            removed.cache_level, removed.tier, removed.medium = 0, common.KV_CACHE_TIER_DEVICE, _MEDIUM
            removed.locality = common.KV_CACHE_LOCALITY_LOCAL
    return message


def _runs(changes: Sequence[Change]) -> Iterator[list[Any]]:
    """Yields neighbours that make one event: blocks that follow each other, or removals."""
    run: list[Any] = []
    for change in changes:
        if run and not _follows(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _follows(before: Change, change: Change) -> bool:
    if isinstance(change, Block):
        return isinstance(before, Block) and change.parent == before.block_hash
    return not isinstance(before, Block)


def _store(stored: common.KvBlocksStored, blocks: Sequence[Block]) -> None:
    first = blocks[0]
    if first.parent is not None:
        stored.parent_block_hash = _signed(first.parent)
    stored.tier, stored.medium = common.KV_CACHE_TIER_DEVICE, _MEDIUM
    stored.locality = common.KV_CACHE_LOCALITY_LOCAL
    for block in blocks:
        told = stored.blocks.add(
            block_hash=_signed(block.block_hash),
            token_ids=block.token_ids,
            block_size=len(block.token_ids),
            cache_level=0,
        )
        for key in block.extra_keys:
            if isinstance(key, str):
                # A salt is in the first block's hash; the others follow from it.
                told.extra_keys.add(text=key)
                stored.cache_salt = key
            else:
                identifier, offset = key
                told.extra_keys.add(multimodal=common.KvMultimodalKey(identifier=identifier, offset=offset))


def _signed(block_hash: int) -> int:
    """Returns the same 64 bits as a signed number."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
