"""From a stream's events to VllmEngine's answers."""

from collections.abc import Iterable

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from protos import inference_pb2 as pb

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


class Replies:
    """Folds one stream. Streamed: a chunk for new tokens, and in the end `complete` for each choice with the tokens of
    its last chunk, as vLLM's own service has it; else only `complete`, with all of them."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        # By choice: the chunks that `complete` repeats, and with what it ended.
        self._kept: dict[int, list[pb.Chunk]] = {}
        self._finishes: dict[int, pb.Finish] = {}

    def take(self, event: pb.GenerateResponse) -> list[vllm.GenerateResponse]:
        """What is to be sent for an event."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._prompt_token_ids = list(event.started.prompt_token_ids)
        elif kind == "prompt_logprobs":
            self._prompt_logprobs.extend(event.prompt_logprobs.logprobs)
        elif kind == "chunk":
            return self._chunk(event.chunk)
        else:
            # Only now is the number of cached tokens known.
            cached_tokens = event.finished.usage.cached_tokens
            return [self._complete(index, cached_tokens) for index in sorted(self._finishes)]
        return []

    def _chunk(self, chunk: pb.Chunk) -> list[vllm.GenerateResponse]:
        is_first = chunk.index not in self._kept
        kept = self._kept.setdefault(chunk.index, [])
        if self._stream:
            kept.clear()
        kept.append(chunk)
        if chunk.HasField("finish"):
            self._finishes[chunk.index] = chunk.finish
        if not self._stream or not chunk.token_ids:
            return []
        answer = vllm.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            # Of this chunk: the gateway adds them up.
            completion_tokens=len(chunk.token_ids),
            output_logprobs=_output_logprobs(chunk.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=chunk.index,
        )
        return [vllm.GenerateResponse(chunk=answer)]

    def _complete(self, index: int, cached_tokens: int) -> vllm.GenerateResponse:
        finish, chunks = self._finishes[index], self._kept[index]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        answer = vllm.GenerateComplete(
            output_ids=token_ids,
            finish_reason=_FINISH_REASONS[finish.reason],
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=_output_logprobs(logprobs for chunk in chunks for logprobs in chunk.logprobs),
            input_logprobs=self._input_logprobs(),
            index=index,
        )
        stop = finish.WhichOneof("stop")
        if stop == "stop_string":
            answer.matched_stop_str = finish.stop_string
        elif stop == "stop_token_id":
            answer.matched_token_id = finish.stop_token_id
        return vllm.GenerateResponse(complete=answer)

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        """One entry a prompt token; that of the first has no value."""
        if not self._prompt_logprobs:
            return None
        first = vllm.InputTokenLogProb()
        rest = [vllm.InputTokenLogProb(value=each.chosen.logprob) for each in self._prompt_logprobs]
        return vllm.InputLogProbs(
            token_logprobs=[first, *rest],
            token_ids=self._prompt_token_ids,
            top_logprobs=[vllm.TopLogProbs(), *map(_top, self._prompt_logprobs)],
        )


def _output_logprobs(logprobs: Iterable[pb.TokenLogprobs]) -> vllm.OutputLogProbs | None:
    each = list(logprobs)
    if not each:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[logprob.chosen.logprob for logprob in each],
        token_ids=[logprob.chosen.token_id for logprob in each],
        top_logprobs=map(_top, each),
    )


def _top(logprobs: pb.TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[each.logprob for each in logprobs.top], token_ids=[each.token_id for each in logprobs.top]
    )
