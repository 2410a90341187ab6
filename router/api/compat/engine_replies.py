"""Folds a stream into the replies of a service of SMG's engines, whose messages have fields of the same names."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from protos import inference_pb2 as pb


class EngineReplies:
    """Folds one stream. stream: a chunk for new tokens, and at the end `complete` for each choice with the tokens of
    its last chunk, as the engines' own services send it; else only `complete`, with all tokens."""

    # The module of the service's messages.
    messages: ClassVar[Any]
    # The service's words for the ends of outputs; others are "abort".
    finish_reasons: ClassVar[Mapping[int, str]]
    # completion_tokens are those of a choice so far; else those in the reply, and the gateway adds them up.
    counts_all: ClassVar[bool]

    def __init__(self, *, stream: bool, first_scored: int = 0) -> None:
        """first_scored: the prompt token from which on logprobs are told."""
        self._stream, self._first_scored = stream, first_scored
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        # By choice: the chunks that `complete` repeats, the number of tokens, and the finish.
        self._kept: dict[int, list[pb.Chunk]] = {}
        self._num_tokens: dict[int, int] = {}
        self._finishes: dict[int, pb.Finish] = {}

    def take(self, event: pb.GenerateResponse) -> list[Any]:
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

    def _response(self, **kind: Any) -> Any:
        """Makes a reply of a chunk or a `complete`."""
        return self.messages.GenerateResponse(**kind)

    def _chunk(self, chunk: pb.Chunk) -> list[Any]:
        is_first = chunk.index not in self._kept
        kept = self._kept.setdefault(chunk.index, [])
        if self._stream:
            kept.clear()
        kept.append(chunk)
        num_new = len(chunk.token_ids)
        self._num_tokens[chunk.index] = self._num_tokens.get(chunk.index, 0) + num_new
        if chunk.HasField("finish"):
            self._finishes[chunk.index] = chunk.finish
        if not self._stream or not chunk.token_ids:
            return []
        answer = self.messages.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[chunk.index] if self.counts_all else num_new,
            output_logprobs=self._output_logprobs(chunk.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=chunk.index,
        )
        return [self._response(chunk=answer)]

    def _complete(self, index: int, cached_tokens: int) -> Any:
        finish, chunks = self._finishes[index], self._kept[index]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        answer = self.messages.GenerateComplete(
            output_ids=token_ids,
            finish_reason=self.finish_reasons.get(finish.reason, "abort"),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[index] if self.counts_all else len(token_ids),
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
        return self._response(complete=answer)

    def _input_logprobs(self) -> Any:
        """Returns one entry a prompt token, None without any. That of the first has no value: nothing precedes it."""
        if not self._prompt_logprobs:
            return None
        messages, first = self.messages, self._first_scored
        values = [messages.InputTokenLogProb()]
        values += [messages.InputTokenLogProb(value=each.chosen.logprob) for each in self._prompt_logprobs]
        tops = [messages.TopLogProbs(), *map(self._top, self._prompt_logprobs)]
        return messages.InputLogProbs(
            token_logprobs=values[first:], token_ids=self._prompt_token_ids[first:], top_logprobs=tops[first:]
        )

    def _output_logprobs(self, logprobs: Iterable[pb.TokenLogprobs]) -> Any:
        each = list(logprobs)
        if not each:
            return None
        told = self.messages.OutputLogProbs(
            token_logprobs=[logprob.chosen.logprob for logprob in each],
            token_ids=[logprob.chosen.token_id for logprob in each],
        )
        self._tops_of(told).extend(map(self._top, each))
        return told

    def _tops_of(self, told: Any) -> Any:
        """Returns the field of OutputLogProbs that tells of other tokens."""
        return told.top_logprobs

    def _top(self, logprobs: pb.TokenLogprobs) -> Any:
        return self.messages.TopLogProbs(
            values=[each.logprob for each in logprobs.top], token_ids=[each.token_id for each in logprobs.top]
        )
