"""Converts vllm.Inference's requests to the router's own, and a stream's events to its answers."""

import uuid
from collections.abc import Sequence

from configs.sampling import ALL_LOGPROBS
from protos import inference_pb2 as pb
from router.compat.protos import vllm_pb2 as vllm
from router.compat.sampling import refuse, sampling_of
from router.errors import InvalidRequest

_NO_TRANSFER = "each replica computes whole requests"
_REFUSED = {"media": "this service takes text and tokens only", "lora_name": "no adapters are served"}
_KV_REFUSED = {"kv_transfer_params": _NO_TRANSFER, "ec_transfer_params": _NO_TRANSFER}
_NAMES = {
    "num_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "include_stop_strings": "include_stop_str_in_output",
    "json": "json_schema",
}


def generate_request(
    request: vllm.GenerateRequest, request_id: str, model_default: pb.SamplingParams
) -> pb.GenerateRequest:
    """model_default: the model's own defaults. Raises InvalidRequest."""
    refuse(request, _REFUSED)
    refuse(request.kv, _KV_REFUSED, "kv.")
    places = {"sampling": request.sampling, "decoding": request.decoding, "stopping": request.stopping}
    shown = request.response
    message = pb.GenerateRequest(
        request_id=request_id,
        model=request.model,
        sampling=sampling_of(places, _NAMES),
        priority=request.priority,
        session_key=request.session_id,
        # A salt that no other request has shares no block.
        cache_salt=uuid.uuid4().hex if request.kv.bypass_prefix_cache else request.kv.cache_salt,
    )
    message.sampling.skip_special_tokens = not shown.HasField("skip_special_tokens") or shown.skip_special_tokens
    _tell(message.sampling, shown)
    if request.HasField("temperature"):
        message.sampling.temperature = request.temperature
    elif not model_default.HasField("temperature"):
        message.sampling.temperature = 0
    if request.WhichOneof("prompt") == "text":
        message.prompt = request.text
    elif request.HasField("token_ids"):
        message.token_ids.ids.extend(request.token_ids.ids)
        message.token_ids.SetInParent()
    if request.truncate_prompt_tokens:
        message.truncate_prompt_tokens = request.truncate_prompt_tokens
    return message


def _tell(sampling: pb.SamplingParams, shown: vllm.ResponseOptions) -> None:
    """Asks for logprobs. Raises InvalidRequest."""
    if shown.output_logprobs:
        sampling.logprobs = 0
    match shown.output_candidates.WhichOneof("select"):
        case "top_n":
            sampling.logprobs = shown.output_candidates.top_n
        case "all":
            sampling.logprobs = ALL_LOGPROBS
        case "token_ids":
            # Their number says how many logprobs there are.
            sampling.ClearField("logprobs")
            sampling.logprob_token_ids.extend(shown.output_candidates.token_ids.ids)
    if shown.prompt_logprobs:
        sampling.prompt_logprobs = 0
    match shown.prompt_candidates.WhichOneof("select"):
        case "top_n":
            sampling.prompt_logprobs = shown.prompt_candidates.top_n
        case "all":
            sampling.prompt_logprobs = ALL_LOGPROBS
        case "token_ids":
            raise InvalidRequest("response.prompt_candidates.token_ids is set: use top_n or all for a prompt")


_FINISHES = {
    pb.FINISH_REASON_LENGTH: vllm.FinishInfo.LENGTH,
    pb.FINISH_REASON_STOP: vllm.FinishInfo.STOP,
    pb.FINISH_REASON_REPETITION: vllm.FinishInfo.STOP,
}


class Replies:
    """Folds one stream into responses: one for each chunk."""

    def __init__(self, shown: vllm.ResponseOptions) -> None:
        """shown: what the client wants to see; not held, for a part of a message keeps all of it."""
        self._shows_text = shown.output_text if shown.HasField("output_text") else True
        self._shows_token_ids, self._shows_prompt = shown.output_token_ids, shown.prompt_token_ids
        self._has_candidates = shown.HasField("output_candidates")
        self._has_prompt_candidates = shown.HasField("prompt_candidates")
        self._prompt_token_ids: Sequence[int] = ()
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        self._is_first = True
        self._num_tokens: dict[int, int] = {}

    def take(self, event: pb.GenerateResponse) -> list[vllm.GenerateResponse]:
        """Takes in an event. Returns what is to be sent for it."""
        match event.WhichOneof("event"):
            case "started":
                self._prompt_token_ids = event.started.prompt_token_ids
            case "prompt_logprobs":
                self._prompt_logprobs.extend(event.prompt_logprobs.logprobs)
            case "chunk":
                reply = vllm.GenerateResponse(outputs=self._output(event.chunk))
                if self._is_first:
                    self._is_first = False
                    reply.prompt_info.CopyFrom(self._prompt_info())
                return [reply]
        return []

    def _prompt_info(self) -> vllm.PromptInfo:
        logprobs = self._prompt_logprobs
        info = vllm.PromptInfo(num_prompt_tokens=len(self._prompt_token_ids))
        if self._shows_prompt:
            info.token_ids.extend(self._prompt_token_ids)
        if logprobs:
            # Nothing precedes the first token.
            info.logprobs.extend([0.0, *(each.chosen.logprob for each in logprobs)])
            info.ranks.extend([0, *(each.chosen.rank for each in logprobs)])
            if self._has_prompt_candidates:
                info.candidate_tokens.extend([vllm.CandidateTokenInfo(), *map(_candidates, logprobs)])
        return info

    def _output(self, chunk: pb.Chunk) -> vllm.SequenceOutput:
        output = vllm.SequenceOutput(index=chunk.index, num_tokens=len(chunk.token_ids))
        if self._shows_text:
            output.text = chunk.text
        if self._shows_token_ids:
            output.token_ids.extend(chunk.token_ids)
        if chunk.logprobs:
            output.logprobs.extend(each.chosen.logprob for each in chunk.logprobs)
            output.ranks.extend(each.chosen.rank for each in chunk.logprobs)
            if self._has_candidates:
                output.candidate_tokens.extend(map(_candidates, chunk.logprobs))
        self._num_tokens[chunk.index] = self._num_tokens.get(chunk.index, 0) + len(chunk.token_ids)
        if chunk.HasField("finish"):
            output.finish_info.CopyFrom(self._finish_info(chunk))
        return output

    def _finish_info(self, chunk: pb.Chunk) -> vllm.FinishInfo:
        finish = chunk.finish
        info = vllm.FinishInfo(
            num_output_tokens=self._num_tokens[chunk.index],
            finish_reason=_FINISHES.get(finish.reason, vllm.FinishInfo.ABORTED),
        )
        stop = finish.WhichOneof("stop")
        if stop is not None:
            setattr(info, stop, getattr(finish, stop))
        elif finish.reason == pb.FINISH_REASON_STOP and chunk.token_ids:
            info.eos_token_id = chunk.token_ids[-1]
        return info


class Joined:
    """The responses of one sequence as one."""

    def __init__(self) -> None:
        self._whole = vllm.GenerateResponse()
        self._texts: list[str] = []
        self._num_tokens = 0

    def add(self, reply: vllm.GenerateResponse) -> None:
        self._texts.append(reply.outputs.text)
        self._num_tokens += reply.outputs.num_tokens
        # Lists are joined by MergeFrom; texts and numbers are replaced.
        reply.outputs.ClearField("text")
        self._whole.MergeFrom(reply)

    def message(self) -> vllm.GenerateResponse:
        whole = self._whole
        if self._texts:
            whole.outputs.text, whole.outputs.num_tokens = "".join(self._texts), self._num_tokens
        return whole


def _candidates(logprobs: pb.TokenLogprobs) -> vllm.CandidateTokenInfo:
    info = vllm.CandidateTokenInfo()
    for each in logprobs.top:
        if each.token_id != logprobs.chosen.token_id:
            info.tokens.add(id=each.token_id, logprob=each.logprob, rank=each.rank)
    return info
