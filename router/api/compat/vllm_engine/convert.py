"""Converts VllmEngine's requests to the router's own, and a stream's events to VllmEngine's answers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from configs.sampling import ALL_LOGPROBS, BY_NAME, PARAMETERS, Parameter
from protos import inference_pb2 as pb
from router.api.compat.engine_replies import EngineReplies
from router.errors import InvalidRequest

# Fields of the same name, and the same meaning of 0, in both.
_SAME = ("min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
# Numbers that both have.
_NUMBERS = tuple(each for each in PARAMETERS if each.name in vllm.SamplingParams.DESCRIPTOR.fields_by_name)
# The field is signed in Octavo's message.
_MOST_TOP_K = BY_NAME["top_k"].high
# Fields of a request that need what is not supported here.
_REFUSED = {
    "mm_inputs": "images, audio and video are not supported",
    "media_refs": "images, audio and video are not supported",
    "kv_transfer_params": "KV can't be taken over from another engine",
    "kv_transfer_params_json": "KV can't be taken over from another engine",
}


def generate_request(request: vllm.GenerateRequest, request_id: str) -> pb.GenerateRequest:
    """Raises InvalidRequest."""
    for field, reason in _REFUSED.items():
        if request.HasField(field):
            raise InvalidRequest(f"{field} is set: {reason}; leave it unset")
    if request.extra_mm_inputs:
        raise InvalidRequest(f"extra_mm_inputs is set: {_REFUSED['mm_inputs']}; leave it empty")
    if request.data_parallel_rank:
        raise InvalidRequest(
            f"data_parallel_rank={request.data_parallel_rank}: this router chooses among its replicas and shows as one "
            "rank; leave it unset"
        )
    message = pb.GenerateRequest(request_id=request_id, sampling=_sampling(request.sampling_params))
    if request.WhichOneof("input") == "text":
        message.prompt = request.text
    else:
        message.token_ids.ids.extend(request.tokenized.input_ids)
        message.token_ids.SetInParent()
    return message


def _sampling(given: vllm.SamplingParams) -> pb.SamplingParams:
    """Takes vLLM's defaults for unset fields, not the model's, which GetModelInfo returns."""
    if given.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(
            f"sampling_params.truncate_prompt_tokens={given.truncate_prompt_tokens}: prompts are taken whole; "
            "shorten it before it is sent"
        )
    if given.top_k > _MOST_TOP_K:
        raise InvalidRequest(f"sampling_params.top_k={given.top_k}: use at most {_MOST_TOP_K}, or 0 for off")
    sampling = pb.SamplingParams(
        n=given.n,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        **{name: getattr(given, name) for name in _SAME},
        **{each.name: _number(given, each) for each in _NUMBERS},
    )
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            count = getattr(given, name)
            if count < -1:
                raise InvalidRequest(f"sampling_params.{name}={count}: use -1 for all tokens, or 0 and above")
            setattr(sampling, name, ALL_LOGPROBS if count == -1 else count)
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise InvalidRequest(f"sampling_params.logit_bias[{token_id}]: token ids are 0 and above")
        sampling.logit_bias[token_id] = bias
    _constrain(sampling.constraint, given)
    if given.HasField("max_tokens"):
        sampling.max_tokens = given.max_tokens
    if given.HasField("seed"):
        # Negative seeds are the other half of the 64 bits.
        sampling.seed = given.seed % 2**64
    return sampling


def _constrain(constraint: pb.Constraint, given: vllm.SamplingParams) -> None:
    match given.WhichOneof("constraint"):
        case None:
            pass
        case "choice":
            constraint.choice.texts.extend(given.choice.choices)
            constraint.choice.SetInParent()
        case kind:
            # The other kinds have the same names and types.
            setattr(constraint, kind, getattr(given, kind))


def _number(given: vllm.SamplingParams, parameter: Parameter) -> Any:
    """Reads a number; 0 means unset where the field has no presence."""
    value = getattr(given, parameter.name)
    if vllm.SamplingParams.DESCRIPTOR.fields_by_name[parameter.name].has_presence:
        return value if given.HasField(parameter.name) else parameter.default  # type: ignore[arg-type]
    return value or parameter.default


class Replies(EngineReplies):
    messages = vllm
    finish_reasons: ClassVar[Mapping[int, str]] = {
        pb.FINISH_REASON_STOP: "stop",
        pb.FINISH_REASON_LENGTH: "length",
        pb.FINISH_REASON_REPETITION: "repetition",
        pb.FINISH_REASON_ERROR: "error",
    }
    counts_all = False
