"""The parts that both kinds of replies share: usage, prompts and finishes."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedList, Grow, encode, uncounted
from router.api.gateway.errors import body_of
from router.api.gateway.openai.form import Form
from router.api.gateway.openai.logprobs import EchoedLogprobs, prompt_logprobs
from router.errors import Internal
from router.text.tokenizer import Tokenizer

_FINISHES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_REPETITION: "repetition",
}


def finish_of(chunk: pb.Chunk) -> str | None:
    """Returns the finish_reason; None: more comes. Raises Internal for an end that is a failure, not a finish."""
    if not chunk.HasField("finish"):
        return None
    reason = chunk.finish.reason
    if reason not in _FINISHES:
        raise Internal(f"the output ended early: {pb.FinishReason.Name(reason)}")
    return _FINISHES[reason]


def stop_reason(finish: pb.Finish) -> str | int | None:
    """Returns vLLM's stop_reason: the string or the token id that ended the output."""
    if finish.reason == pb.FINISH_REASON_REPETITION:
        return "repetition_detected"
    which = finish.WhichOneof("stop")
    return None if which is None else getattr(finish, which)


class Reply:
    """Folds a request's events into the JSON of its answer: chunks of a stream, or one whole, of which each event is
    encoded as it comes."""

    def __init__(
        self, form: Form, base: dict[str, Any], num_prompts: int, table: Tokenizer, grow: Grow = uncounted
    ) -> None:
        """base: id, created and model. grow: counts what is kept."""
        self._form, self._base, self._table, self._grow = form, base, table, grow
        # Each prompt's tokens and logprobs, as far as they are shown.
        self.prompts = [EncodedList(grow) for _ in range(num_prompts)]
        has_logprobs = form.num_prompt_logprobs is not None and not form.is_stream
        self._prompt_logprobs = [EncodedList(grow) for _ in range(num_prompts if has_logprobs else 0)]
        has_echoed = form.has_echo and form.num_logprobs is not None
        self._echoed = [EchoedLogprobs(grow, as_ids=form.has_ids_for_tokens) for _ in range(num_prompts * has_echoed)]
        self._num_prompt_tokens = self._num_cached = self._num_output = 0
        self._num_drafts = self._num_accepted = 0
        # Known at the end, of outputs that are parsed.
        self._num_reasoning: int | None = None
        self.prompt_text: str | None = None

    def show_prompt(self, prompt: int, text: str) -> None:
        """Has the answer show a prompt's text."""
        self.prompt_text = text

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None:
        """Takes in an event. Returns the chunk to stream for it, None if there is none. Keeps it only for whole().

        Raises Internal.
        """
        match event.WhichOneof("event"):
            case "chunk":
                if not self._form.drops_output:
                    self._num_output += len(event.chunk.token_ids)
                piece = self._take_chunk(prompt, event.chunk)
                if piece is not None and self._form.has_running_usage:
                    piece["usage"] = self.usage
                return piece
            case "started":
                self._num_prompt_tokens += len(event.started.prompt_token_ids)
                self._take_prompt(prompt, event.started.prompt_token_ids)
            case "prompt_logprobs":
                self._take_prompt_logprobs(prompt, event.prompt_logprobs)
            case "finished":
                usage = event.finished.usage
                self._num_cached += usage.cached_tokens
                self._num_drafts += usage.draft_tokens
                self._num_accepted += usage.accepted_draft_tokens
                if self._form.is_parsed:
                    self._num_reasoning = (self._num_reasoning or 0) + usage.reasoning_tokens
        return None

    def _take_prompt(self, prompt: int, token_ids: Sequence[int]) -> None:
        if self._form.has_token_ids:
            self.prompts[prompt].extend(list(token_ids))
        if self._prompt_logprobs:
            # Nothing precedes the first token.
            self._prompt_logprobs[prompt].extend([None])
        if self._echoed:
            first = pb.TokenLogprob(token_id=token_ids[0], token=self._table.token_bytes(token_ids[0]))
            self._echoed[prompt].begin(first)

    def _take_prompt_logprobs(self, prompt: int, frame: pb.PromptLogprobs) -> None:
        form = self._form
        if self._prompt_logprobs:
            self._prompt_logprobs[prompt].extend(prompt_logprobs(frame.logprobs, form.num_prompt_logprobs or 0))
        if self._echoed:
            self._echoed[prompt].add_prompt(frame.logprobs, form.num_logprobs or 0)

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        raise NotImplementedError

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt_tokens + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
        details: dict[str, int] = {}
        if self._num_reasoning is not None:
            details["reasoning_tokens"] = self._num_reasoning
        if details := details | self._predictions:
            usage["completion_tokens_details"] = details
        return usage

    @property
    def _predictions(self) -> dict[str, int]:
        """Speculation by OpenAI's names; empty if nothing was drafted."""
        if not self._num_drafts:
            return {}
        return {
            "accepted_prediction_tokens": self._num_accepted,
            "rejected_prediction_tokens": self._num_drafts - self._num_accepted,
        }

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk of a stream with include_usage."""
        return {**self._base, "choices": [], "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer, a tree to encode once (router.api.encoded)."""
        raise NotImplementedError

    # --- Server-sent events, as EventSourceResponse takes them

    def pieces(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, str]]:
        """Takes in an event. Returns what a stream sends for it. Raises Internal."""
        piece = self.take(prompt, event)
        return [] if piece is None else [self._sent(piece)]

    def last_pieces(self) -> list[dict[str, str]]:
        """Returns what ends a stream."""
        usage = [self._sent(self.usage_chunk())] if self._form.has_usage_chunk else []
        return [*usage, {"data": "[DONE]"}]

    def error_piece(self, error: Exception) -> dict[str, str]:
        """Returns what ends a stream that breaks."""
        return self._sent(body_of(error))

    def _sent(self, piece: dict[str, Any]) -> dict[str, str]:
        return {"data": encode(piece).decode()}
