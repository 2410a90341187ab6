"""Converts SglangScheduler's requests to the router's own, and a stream's events to its answers."""

from collections.abc import Iterable

from configs.sampling import BY_NAME
from protos import inference_pb2 as pb
from protos import sglang_pb2 as sglang
from router.errors import InvalidRequest

# The field is signed in both messages.
_MOST_TOP_K = BY_NAME["top_k"].high
_CONSTRAINTS = {
    "regex": "regex", "json_schema": "json_schema", "ebnf_grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip
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


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_REPETITION: "stop",
}


class Replies:
    """Folds one stream into replies. For a request with `stream`: a chunk for new tokens, and at the end `complete` for
    each choice with the tokens of its last chunk, as SGLang's own service sends it; else only `complete`, with all."""

    def __init__(self, request: sglang.GenerateRequest, request_id: str) -> None:
        self._request_id, self._stream = request_id, request.stream
        self._first_scored = max(request.logprob_start_len, 0)
        self._has_own_ids = bool(request.token_ids_logprob)
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        # By choice: the chunks that `complete` repeats, the number of tokens, and the finish.
        self._kept: dict[int, list[pb.Chunk]] = {}
        self._num_tokens: dict[int, int] = {}
        self._finishes: dict[int, pb.Finish] = {}

    def take(self, event: pb.GenerateResponse) -> list[sglang.GenerateResponse]:
        """Takes in an event. Returns what is to be sent for it."""
        match event.WhichOneof("event"):
            case "started":
                self._prompt_token_ids = list(event.started.prompt_token_ids)
            case "prompt_logprobs":
                self._prompt_logprobs.extend(event.prompt_logprobs.logprobs)
            case "chunk":
                return self._chunk(event.chunk)
            case "finished":
                # Only now is the number of cached tokens known.
                cached_tokens = event.finished.usage.cached_tokens
                return [self._complete(index, cached_tokens) for index in sorted(self._finishes)]
        return []

    def _chunk(self, chunk: pb.Chunk) -> list[sglang.GenerateResponse]:
        is_first = chunk.index not in self._kept
        kept = self._kept.setdefault(chunk.index, [])
        if self._stream:
            kept.clear()
        kept.append(chunk)
        self._num_tokens[chunk.index] = self._num_tokens.get(chunk.index, 0) + len(chunk.token_ids)
        if chunk.HasField("finish"):
            self._finishes[chunk.index] = chunk.finish
        if not self._stream or not chunk.token_ids:
            return []
        answer = sglang.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[chunk.index],
            output_logprobs=self._output_logprobs(chunk.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=chunk.index,
        )
        return [sglang.GenerateResponse(request_id=self._request_id, chunk=answer)]

    def _complete(self, index: int, cached_tokens: int) -> sglang.GenerateResponse:
        finish, chunks = self._finishes[index], self._kept[index]
        answer = sglang.GenerateComplete(
            output_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
            finish_reason=_FINISH_REASONS.get(finish.reason, "abort"),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[index],
            cached_tokens=cached_tokens,
            output_logprobs=self._output_logprobs(logprobs for chunk in chunks for logprobs in chunk.logprobs),
            input_logprobs=self._input_logprobs(),
            index=index,
        )
        stop = finish.WhichOneof("stop")
        if stop == "stop_string":
            answer.matched_stop_str = finish.stop_string
        elif stop == "stop_token_id":
            answer.matched_token_id = finish.stop_token_id
        return sglang.GenerateResponse(request_id=self._request_id, complete=answer)

    def _input_logprobs(self) -> sglang.InputLogProbs | None:
        if not self._prompt_logprobs:
            return None
        first = self._first_scored
        # Nothing precedes the prompt's first token.
        values = [sglang.InputTokenLogProb()]
        values += [sglang.InputTokenLogProb(value=each.chosen.logprob) for each in self._prompt_logprobs]
        tops = [sglang.TopLogProbs(), *map(_top, self._prompt_logprobs)]
        return sglang.InputLogProbs(
            token_logprobs=values[first:], token_ids=self._prompt_token_ids[first:], top_logprobs=tops[first:]
        )

    def _output_logprobs(self, logprobs: Iterable[pb.TokenLogprobs]) -> sglang.OutputLogProbs | None:
        each = list(logprobs)
        if not each:
            return None
        told = sglang.OutputLogProbs(
            token_logprobs=[logprob.chosen.logprob for logprob in each],
            token_ids=[logprob.chosen.token_id for logprob in each],
        )
        (told.token_ids_logprobs if self._has_own_ids else told.top_logprobs).extend(map(_top, each))
        return told


def _top(logprobs: pb.TokenLogprobs) -> sglang.TopLogProbs:
    return sglang.TopLogProbs(
        values=[each.logprob for each in logprobs.top], token_ids=[each.token_id for each in logprobs.top]
    )
