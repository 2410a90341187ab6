"""POST /v1/chat/completions: the JSON of a whole answer, and of its pieces."""

from typing import Any

from protos import inference_pb2 as pb
from router.gateway.replies import chat_logprobs, finish_of, usage_of
from router.gateway.schemas import ChatCompletionRequest


class ChatReply:
    """Of one request."""

    def __init__(self, request: ChatCompletionRequest, base: dict[str, Any]) -> None:
        """base: id, created and model."""
        self._has_logprobs = request.logprobs
        self._base = base
        self._text = [""] * request.n
        self._has_begun = [False] * request.n
        self._finish: list[str | None] = [None] * request.n
        self._logprobs: list[list[pb.TokenLogprobs]] = [[] for _ in range(request.n)]
        self._usages: list[pb.Usage] = []

    def take(self, prompt: int, event: pb.GenerateResponse) -> dict[str, Any] | None:
        """The piece that says the same, for a stream; None: there is nothing to say. Raises Internal."""
        if event.HasField("finished"):
            self._usages.append(event.finished.usage)
        if not event.HasField("chunk"):
            return None
        chunk, index = event.chunk, event.chunk.index
        self._text[index] += chunk.text
        self._finish[index] = finish_of(chunk)
        self._logprobs[index] += chunk.logprobs
        delta = {"content": chunk.text}
        if not self._has_begun[index]:
            self._has_begun[index], delta = True, {"role": "assistant", **delta}
        logprobs = chat_logprobs(chunk.logprobs) if self._has_logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": self._finish[index]}
        return self._piece([choice])

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of(self._usages)

    def usage_piece(self) -> dict[str, Any]:
        """The last piece of a stream that was asked for it."""
        return {**self._piece([]), "usage": self.usage}

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

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "chat.completion.chunk", **self._base, "choices": choices}
