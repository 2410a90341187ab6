"""Folds a stream into the replies of a service of SMG's engines, whose messages have fields of the same names."""

from collections.abc import Iterable, Mapping, Sequence
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
        # InputLogProbs, and the position after its last one; None without any.
        self._input_logprobs: Any = None
        self._input_end = 0
        # By choice: a GenerateComplete with the tokens that `complete` repeats, the number of tokens, and the finish.
        self._kept: dict[int, Any] = {}
        self._num_tokens: dict[int, int] = {}
        self._finishes: dict[int, pb.Finish] = {}

    def take(self, event: pb.GenerateResponse) -> Iterable[Any]:
        """Takes in an event. Returns what is to be sent for it, each made when its turn comes."""
        match event.WhichOneof("event"):
            case "started":
                self._prompt_token_ids = list(event.started.prompt_token_ids)
            case "prompt_logprobs":
                self._add_input(event.prompt_logprobs.logprobs)
            case "chunk":
                return self._chunk(event.chunk)
            case "finished":
                # Only now is the number of cached tokens known.
                cached_tokens = event.finished.usage.cached_tokens
                return (self._complete(index, cached_tokens) for index in sorted(self._finishes))
        return []

    def _response(self, **kind: Any) -> Any:
        """Makes a reply of a chunk or a `complete`."""
        return self.messages.GenerateResponse(**kind)

    def _chunk(self, chunk: pb.Chunk) -> list[Any]:
        is_first = chunk.index not in self._kept
        if is_first or self._stream:
            self._kept[chunk.index] = self.messages.GenerateComplete()
        kept, told = self._kept[chunk.index], self._output_logprobs(chunk.logprobs)
        kept.output_ids.extend(chunk.token_ids)
        if told is not None:
            # Lists are joined.
            kept.output_logprobs.MergeFrom(told)
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
            output_logprobs=told,
            input_logprobs=self._input_logprobs if is_first else None,
            index=chunk.index,
        )
        return [self._response(chunk=answer)]

    def _complete(self, index: int, cached_tokens: int) -> Any:
        finish, kept = self._finishes[index], self._kept.pop(index)
        answer = self.messages.GenerateComplete(
            output_ids=kept.output_ids,
            finish_reason=self.finish_reasons.get(finish.reason, "abort"),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[index] if self.counts_all else len(kept.output_ids),
            cached_tokens=cached_tokens,
            output_logprobs=kept.output_logprobs if kept.HasField("output_logprobs") else None,
            input_logprobs=self._input_logprobs,
            index=index,
        )
        stop = finish.WhichOneof("stop")
        if stop == "stop_string":
            answer.matched_stop_str = finish.stop_string
        elif stop == "stop_token_id":
            answer.matched_token_id = finish.stop_token_id
        return self._response(complete=answer)

    def _add_input(self, logprobs: Sequence[pb.TokenLogprobs]) -> None:
        """Adds an entry a prompt token. That of the first has no value: nothing precedes it."""
        messages = self.messages
        values = [messages.InputTokenLogProb(value=each.chosen.logprob) for each in logprobs]
        tops = list(map(self._top, logprobs))
        if self._input_logprobs is None:
            first = self._first_scored
            self._input_logprobs = messages.InputLogProbs(token_ids=self._prompt_token_ids[first:])
            values, tops = [messages.InputTokenLogProb(), *values], [messages.TopLogProbs(), *tops]
        # Those before the first one that is told are left out.
        skipped = max(self._first_scored - self._input_end, 0)
        self._input_end += len(values)
        self._input_logprobs.token_logprobs.extend(values[skipped:])
        self._input_logprobs.top_logprobs.extend(tops[skipped:])

    def _output_logprobs(self, logprobs: Sequence[pb.TokenLogprobs]) -> Any:
        """Returns None without any."""
        if not logprobs:
            return None
        told = self.messages.OutputLogProbs(
            token_logprobs=[each.chosen.logprob for each in logprobs],
            token_ids=[each.chosen.token_id for each in logprobs],
        )
        self._tops_of(told).extend(map(self._top, logprobs))
        return told

    def _tops_of(self, told: Any) -> Any:
        """Returns the field of OutputLogProbs that tells of other tokens."""
        return told.top_logprobs

    def _top(self, logprobs: pb.TokenLogprobs) -> Any:
        return self.messages.TopLogProbs(
            values=[each.logprob for each in logprobs.top], token_ids=[each.token_id for each in logprobs.top]
        )
