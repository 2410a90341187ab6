"""SGLang's gRPC service, sglang.grpc.scheduler.SglangScheduler, as its routers call it."""

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import grpc.aio

from configs.options import Options
from protos import inference_pb2 as pb
from router.api.grpc_errors import guarded
from router.compat.engines import Context, EngineReplies, EngineService, refuse_calls
from router.compat.protos import sglang_pb2 as sglang
from router.compat.protos.sglang_pb2_grpc import SglangSchedulerServicer, add_SglangSchedulerServicer_to_server
from router.compat.sampling import refuse, sampling_of
from router.errors import InvalidRequest
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from runtime.wire import octavo_version

_ADAPTERS = "no adapters are served"
_NOT_HERE = {
    "SubscribeKvEvents": "read kv_events_endpoint, or leave prefixes to routing_policy",
    "LoadLoRAAdapter": _ADAPTERS,
    "UnloadLoRAAdapter": _ADAPTERS,
    "ListLoadedLoRAAdapters": _ADAPTERS,
}
# Fields that need what is not supported here, if they hold anything.
_REFUSED = {
    "mm_inputs": "images, audio and video are not supported",
    "return_hidden_states": "replicas return tokens and logprobs only",
    "disaggregated_params": "each replica computes whole requests",
    "custom_logit_processor": "requests bring no code",
    "input_embeds": "prompts are token ids",
    "lora_id": "no adapters are served",
    "data_parallel_rank": "this router chooses among its replicas and shows as one rank",
}
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "ebnf_grammar": "grammar",
}


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    """Registers the service and returns its full name."""
    add_SglangSchedulerServicer_to_server(SglangService(intake, replicas), server)
    return [sglang.DESCRIPTOR.services_by_name["SglangScheduler"].full_name]


class SglangService(EngineService, SglangSchedulerServicer):
    messages = sglang
    tokenizer_chunk = sglang.TokenizerChunk

    def __init__(self, intake: Intake, replicas: ReplicaSet) -> None:
        super().__init__(intake, replicas)
        refuse_calls(self, _NOT_HERE)

    def message_of(self, request: sglang.GenerateRequest, request_id: str) -> pb.GenerateRequest:
        return generate_request(request, request_id)

    def replies_to(self, request: sglang.GenerateRequest, request_id: str) -> EngineReplies:
        return Replies(request, request_id)

    @guarded
    async def Abort(self, request: sglang.AbortRequest, context: Context) -> sglang.AbortResponse:
        if (await self._intake.live.cancel(request.request_id)).cancelled:
            return sglang.AbortResponse(success=True)
        return sglang.AbortResponse(message=f"request_id={request.request_id!r}: no live request has it")

    @guarded
    async def GetServerInfo(
        self, request: sglang.GetServerInfoRequest, context: Context
    ) -> sglang.GetServerInfoResponse:
        model = self._intake.model
        info = sglang.GetServerInfoResponse(
            active_requests=self._intake.num_streams,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            sglang_version=f"octavo-{octavo_version()}",
            server_type="grpc",
            max_total_num_tokens=self.load().max_total_num_tokens,
        )
        # Routers look for these.
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


def generate_request(request: sglang.GenerateRequest, request_id: str) -> pb.GenerateRequest:
    """Takes SGLang's defaults for unset fields, not the model's, which GetModelInfo returns. Raises InvalidRequest."""
    refuse(request, _REFUSED)
    refuse(request.sampling_params, {"custom_params": "there are no such parameters"}, "sampling_params.")
    sampling = sampling_of({"sampling_params": request.sampling_params}, _NAMES)
    message = pb.GenerateRequest(request_id=request_id, sampling=sampling)
    message.token_ids.ids.extend(request.tokenized.input_ids)
    message.token_ids.SetInParent()
    if request.return_logprob:
        _ask_logprobs(message.sampling, request)
    return message


def _ask_logprobs(sampling: pb.SamplingParams, request: sglang.GenerateRequest) -> None:
    """Raises InvalidRequest."""
    count = request.top_logprobs_num
    if count < 0:
        raise InvalidRequest(f"top_logprobs_num={count}: use 0 and above")
    if request.token_ids_logprob:
        if count:
            raise InvalidRequest(
                f"token_ids_logprob has {len(request.token_ids_logprob)} ids and top_logprobs_num={count}: use one of "
                "them"
            )
        sampling.logprob_token_ids.extend(request.token_ids_logprob)
    else:
        sampling.logprobs = count
    if request.logprob_start_len >= 0:
        sampling.prompt_logprobs = count


class Replies(EngineReplies):
    messages = sglang
    finish_reasons: ClassVar[Mapping[int, str]] = {
        pb.FINISH_REASON_STOP: "stop",
        pb.FINISH_REASON_LENGTH: "length",
        pb.FINISH_REASON_REPETITION: "stop",
    }
    counts_all = True

    def __init__(self, request: sglang.GenerateRequest, request_id: str) -> None:
        super().__init__(stream=request.stream, first_scored=max(request.logprob_start_len, 0))
        self._request_id = request_id
        self._has_own_ids = bool(request.token_ids_logprob)

    def _response(self, **kind: Any) -> sglang.GenerateResponse:
        return sglang.GenerateResponse(request_id=self._request_id, **kind)

    def _tops_of(self, told: sglang.OutputLogProbs) -> Any:
        return told.token_ids_logprobs if self._has_own_ids else told.top_logprobs
