"""POST /v1/completions: the JSON of a whole answer, and of its pieces."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2 as pb
from router.gateway.replies import completion_logprobs, finish_of, usage_of
from router.gateway.schemas import CompletionRequest

KIND = "text_completion"


class CompletionReply:
    """Of one request: choice i of prompt p is choice p * n + i."""

    def __init__(self, request: CompletionRequest, base: dict[str, Any], echoes: Sequence[str]) -> None:
        """base: id, created and model. echoes: each prompt's text, if it is to come first."""
        self._n, self._has_logprobs = request.n, request.logprobs is not None
        self._base = {"object": KIND, **base}
        self._echoes = [
            echoes[index // request.n] if echoes else "" for index in range(len(request.prompts) * request.n)
        ]
        self._text = [""] * len(self._echoes)
        # Characters of each choice's tokens so far; its text may lag behind them.
        self._offsets = [len(echo) for echo in self._echoes]
        self._finish: list[str | None] = [None] * len(self._echoes)
        self._logprobs: list[list[pb.TokenLogprobs]] = [[] for _ in self._echoes]
        self._usages: list[pb.Usage] = []

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None:
        """The piece that says the same, for a stream; None: there is nothing to say. Raises Internal."""
        if event.HasField("finished"):
            self._usages.append(event.finished.usage)
        if not event.HasField("chunk"):
            return None
        chunk, index = event.chunk, prompt * self._n + event.chunk.index
        text = self._echoes[index] + chunk.text
        self._echoes[index] = ""
        self._text[index] += text
        self._finish[index] = finish_of(chunk)
        self._logprobs[index] += chunk.logprobs
        logprobs = None
        if self._has_logprobs:
            logprobs = completion_logprobs(chunk.logprobs, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish[index]}
        return {**self._base, "choices": [choice]}

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of(self._usages)

    def usage_piece(self) -> dict[str, Any]:
        """The last piece of a stream that was asked for it."""
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
