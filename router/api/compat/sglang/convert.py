"""Converts SglangScheduler's requests to the router's own, and a stream's events to its answers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from configs.sampling import BY_NAME
from protos import inference_pb2 as pb
from protos import sglang_pb2 as sglang
from router.api.compat.engine_replies import EngineReplies
from router.errors import InvalidRequest

# The field is signed in both messages.
_MOST_TOP_K = BY_NAME["top_k"].high
_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
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
_NOT_0 = "data_parallel_rank"


def generate_request(request: sglang.GenerateRequest, request_id: str) -> pb.GenerateRequest:
    """Raises InvalidRequest."""
    given = {field.name for field, _ in request.ListFields()}
    if not request.data_parallel_rank:
        given.discard(_NOT_0)
    for name, reason in _REFUSED.items():
        if name in given:
            raise InvalidRequest(f"{name} is set: {reason}; leave it unset")
    message = pb.GenerateRequest(request_id=request_id, sampling=_sampling(request.sampling_params))
    message.token_ids.ids.extend(request.tokenized.input_ids)
    message.token_ids.SetInParent()
    if request.return_logprob:
        _ask_logprobs(message.sampling, request)
    return message


def _sampling(given: sglang.SamplingParams) -> pb.SamplingParams:
    """Takes SGLang's defaults for unset fields, not the model's, which GetModelInfo returns. Raises InvalidRequest."""
    if given.HasField("custom_params"):
        raise InvalidRequest("sampling_params.custom_params is set: there are no such parameters; leave it unset")
    if not -1 <= given.top_k <= _MOST_TOP_K:
        raise InvalidRequest(f"sampling_params.top_k={given.top_k}: use at most {_MOST_TOP_K}, or -1 for off")
    sampling = pb.SamplingParams(
        n=given.n or 1,
        temperature=given.temperature,
        top_p=given.top_p or 1.0,
        top_k=max(given.top_k, 0),
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        skip_special_tokens=given.skip_special_tokens,
        min_tokens=given.min_new_tokens,
        ignore_eos=given.ignore_eos,
        include_stop_str_in_output=given.no_stop_trim,
    )
    if given.HasField("max_new_tokens"):
        sampling.max_tokens = given.max_new_tokens
    for token_id, bias in given.logit_bias.items():
        if not (token_id.isascii() and token_id.isdecimal() and int(token_id) < 2**32):
            raise InvalidRequest(f"sampling_params.logit_bias[{token_id[:40]!r}]: use a token id, such as '17'")
        sampling.logit_bias[int(token_id)] = bias
    if (kind := given.WhichOneof("constraint")) is not None:
        setattr(sampling.constraint, _CONSTRAINTS[kind], getattr(given, kind))
    return sampling


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
