"""From VllmEngine's request to the router's own."""

from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from protos import inference_pb2 as pb
from router.errors import InvalidRequest

# What both have under one name and with one meaning of 0.
_SAME = (
    "top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
# That field has a sign in Octavo's message.
_MOST_TOP_K = 2**31 - 1
# Messages of a request that need what there is not here.
_REFUSED = {
    "mm_inputs": "images, audio and video are not taken",
    "media_refs": "images, audio and video are not taken",
    "kv_transfer_params": "KV is not taken over from another engine",
    "kv_transfer_params_json": "KV is not taken over from another engine",
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
    """Unset fields mean vLLM's defaults, not the model's: who wants these finds them in GetModelInfo."""
    constraint = given.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"sampling_params.{constraint} is set: structured outputs are not there; leave it unset")
    if given.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(
            f"sampling_params.truncate_prompt_tokens={given.truncate_prompt_tokens}: prompts are taken whole; "
            "shorten it before it is sent"
        )
    if given.top_k > _MOST_TOP_K:
        raise InvalidRequest(f"sampling_params.top_k={given.top_k}: use at most {_MOST_TOP_K}, or 0 for off")
    sampling = pb.SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        n=given.n,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        **_same(given),
    )
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            count = getattr(given, name)
            if count < 0:
                raise InvalidRequest(f"sampling_params.{name}={count}: use 0 to 20; all of the vocabulary is too much")
            setattr(sampling, name, count)
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise InvalidRequest(f"sampling_params.logit_bias[{token_id}]: token ids are 0 and above")
        sampling.logit_bias[token_id] = bias
    if given.HasField("max_tokens"):
        sampling.max_tokens = given.max_tokens
    if given.HasField("seed"):
        # Some are negative; they are as many.
        sampling.seed = given.seed % 2**64
    return sampling


def _same(given: vllm.SamplingParams) -> dict[str, Any]:
    return {name: getattr(given, name) for name in _SAME}
