"""The JSON of OpenAI's answers, whole or in chunks: completions and chat completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.parsing import Form
from router.errors import Internal

_FINISHES = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def finish_of(chunk: pb.Chunk) -> str | None:
    """Returns the finish_reason; None: more comes. Raises Internal for an end that is a failure, not a finish."""
    if not chunk.HasField("finish"):
        return None
    reason = chunk.finish.reason
    if reason not in _FINISHES:
        raise Internal(f"the output ended early: {pb.FinishReason.Name(reason)}")
    return _FINISHES[reason]


def usage_of(usages: Iterable[pb.Usage]) -> dict[str, Any]:
    usages = list(usages)
    prompt, completion = sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
    }


def chat_logprobs(logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
    def one(token: pb.TokenLogprob) -> dict[str, Any]:
        return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.token)}

    return {"content": [{**one(each.chosen), "top_logprobs": [one(top) for top in each.top]} for each in logprobs]}


def completion_logprobs(logprobs: Sequence[pb.TokenLogprobs], text_offset: int) -> dict[str, Any]:
    """text_offset: characters of the choice before these tokens."""
    tokens, offsets = [_text(each.chosen) for each in logprobs], []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [each.chosen.logprob for each in logprobs],
        "top_logprobs": [{_text(top): top.logprob for top in each.top} for each in logprobs],
        "text_offset": offsets,
    }


def _text(token: pb.TokenLogprob) -> str:
    """The text of a token, with U+FFFD for bytes that are no whole character."""
    return token.token.decode(errors="replace")


COMPLETION_KIND = "text_completion"


class CompletionReply:
    """The reply to one request: choice i of prompt p is choice p * n + i."""

    def __init__(self, form: Form, base: dict[str, Any], num_prompts: int, echoes: Sequence[str]) -> None:
        """base: id, created and model. echoes: each prompt's text, if it is to come first."""
        self._n, self._has_logprobs, self._is_stream = form.n, form.has_logprobs, form.is_stream
        self._base = {"object": COMPLETION_KIND, **base}
        self._echoes = [echoes[index // form.n] if echoes else "" for index in range(num_prompts * form.n)]
        self._text = [""] * len(self._echoes)
        # Characters of each choice's tokens so far; its text may lag behind them.
        self._offsets = [len(echo) for echo in self._echoes]
        self._finish: list[str | None] = [None] * len(self._echoes)
        self._logprobs: list[list[pb.TokenLogprobs]] = [[] for _ in self._echoes]
        self._usages: list[pb.Usage] = []

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None:
        """Takes in an event. Returns the chunk to stream for it, None if there is none. Keeps it only for whole().

        Raises Internal.
        """
        if event.HasField("finished"):
            self._usages.append(event.finished.usage)
        if not event.HasField("chunk"):
            return None
        chunk, index = event.chunk, prompt * self._n + event.chunk.index
        text = self._echoes[index] + chunk.text
        self._echoes[index] = ""
        self._finish[index] = finish_of(chunk)
        if not self._is_stream:
            self._text[index] += text
            self._logprobs[index] += chunk.logprobs
            return None
        logprobs = None
        if self._has_logprobs:
            logprobs = completion_logprobs(chunk.logprobs, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish[index]}
        return {**self._base, "choices": [choice]}

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of(self._usages)

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk of a stream with include_usage."""
        return {**self._base, "choices": [], "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": text,
                "logprobs": completion_logprobs(self._logprobs[index], 0) if self._has_logprobs else None,
                "finish_reason": self._finish[index],
            }
            for index, text in enumerate(self._text)
        ]
        return {**self._base, "choices": choices, "usage": self.usage}


class ChatReply:
    """The reply to one request."""

    def __init__(self, form: Form, base: dict[str, Any]) -> None:
        """base: id, created and model."""
        self._has_logprobs, self._is_stream = form.has_logprobs, form.is_stream
        self._base = base
        self._text = [""] * form.n
        self._has_begun = [False] * form.n
        self._finish: list[str | None] = [None] * form.n
        self._logprobs: list[list[pb.TokenLogprobs]] = [[] for _ in range(form.n)]
        self._usages: list[pb.Usage] = []

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None:
        """Takes in an event. Returns the chunk to stream for it, None if there is none. Keeps it only for whole().

        Raises Internal.
        """
        if event.HasField("finished"):
            self._usages.append(event.finished.usage)
        if not event.HasField("chunk"):
            return None
        chunk, index = event.chunk, event.chunk.index
        self._finish[index] = finish_of(chunk)
        if not self._is_stream:
            self._text[index] += chunk.text
            self._logprobs[index] += chunk.logprobs
            return None
        delta = {"content": chunk.text}
        if not self._has_begun[index]:
            self._has_begun[index], delta = True, {"role": "assistant", **delta}
        logprobs = chat_logprobs(chunk.logprobs) if self._has_logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish[index]}
        return self._chunk([choice])

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of(self._usages)

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk of a stream with include_usage."""
        return {**self._chunk([]), "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": chat_logprobs(self._logprobs[index]) if self._has_logprobs else None,
                "finish_reason": self._finish[index],
            }
            for index, text in enumerate(self._text)
        ]
        return {"object": "chat.completion", **self._base, "choices": choices, "usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "chat.completion.chunk", **self._base, "choices": choices}
