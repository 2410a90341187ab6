"""The reply to a request for a response, whole or as typed events."""

from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.errors import body_of, http_status
from router.api.gateway.openai.form import ASSISTANT
from router.api.gateway.openai.logprobs import chat_logprobs
from router.api.gateway.openai.reply import Reply, TokenTable, finish_of
from router.api.gateway.responses.convert import ResponseForm

_TOO_MANY = 429


class ResponseReply(Reply):
    """Its output is one message with one part of text."""

    def __init__(self, form: ResponseForm, response_id: str, created: int, model: str, table: TokenTable) -> None:
        base = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            **form.shown,
        }
        super().__init__(form, base, 1, table)
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._texts: list[str] = []
        self._finish: str | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._num_events = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def not_stored(self) -> None:
        """The answer says that it can't be continued."""
        self._base["store"] = False

    # --- Events

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first text."""
        response, item = self._response("in_progress", []), {**self._item("in_progress"), "content": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._of_part("response.content_part.added", part=_part("", [])),
        ]

    def delta(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        """Takes in an event of the stream, and returns those to send for it. Raises Internal."""
        piece = self.take(prompt, event)
        return [] if piece is None else [self._of_part("response.output_text.delta", **piece)]

    def closing(self) -> list[dict[str, Any]]:
        """The events of the finished item."""
        item = self._item(self._status)
        (part,) = item["content"]
        text, logprobs = part["text"], part["logprobs"]
        return [
            self._of_part("response.output_text.done", text=text, logprobs=logprobs),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def last(self) -> dict[str, Any]:
        return self._event(f"response.{self._status}", response=self.whole())

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event after which a stream ends early."""
        code = "rate_limit_exceeded" if http_status(error) == _TOO_MANY else "server_error"
        told = {"code": code, "message": body_of(error)["error"]["message"]}
        response = self._response("failed", [self._item("incomplete")])
        return self._event("response.failed", response={**response, "error": told})

    # --- The whole

    def whole(self) -> dict[str, Any]:
        response = self._response(self._status, [self._item(self._status)])
        if self._finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": self._usage}

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt_tokens + self._num_output,
        }

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        logprobs = self._shown(chunk)
        self._texts.append(chunk.text)
        self._logprobs += logprobs
        self._finish = finish_of(chunk) or self._finish
        return {"delta": chunk.text, "logprobs": logprobs} if chunk.text or logprobs else None

    def _shown(self, chunk: pb.Chunk) -> list[dict[str, Any]]:
        return [] if self._form.num_logprobs is None else chat_logprobs(chunk.logprobs)["content"]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self._base, **own}

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part(self.text, self._logprobs)]
        return {"id": self._item_id, "type": "message", "role": ASSISTANT, "status": status, "content": content}

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
