"""The reply to a request for a response, whole or as typed events."""

from collections.abc import Iterable, Iterator
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import Grow, uncounted
from router.api.gateway.errors import body_of, http_status
from router.api.gateway.openai.logprobs import chat_logprobs
from router.api.gateway.openai.outputs import deltas_of
from router.api.gateway.openai.reply import Reply, finish_of
from router.api.gateway.responses.convert import ResponseForm
from router.api.gateway.responses.items import Item
from router.text.tokenizer import Tokenizer

_TOO_MANY = 429


class ResponseReply(Reply):
    """Its output is items: reasoning, messages of one part of text, and calls. It has a message if it has no other."""

    def __init__(
        self,
        form: ResponseForm,
        response_id: str,
        created: int,
        model: str,
        table: Tokenizer,
        grow: Grow = uncounted,
    ) -> None:
        base = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            **form.shown,
        }
        super().__init__(form, base, 1, table, grow)
        self._response_id = response_id
        self._items: list[Item] = []
        self._finish: str | None = None
        # Logprobs of tokens whose text has not come yet.
        self._logprobs: list[dict[str, Any]] = []
        # Events to send.
        self._events: list[dict[str, Any]] = []
        self._num_events = 0

    @property
    def text(self) -> str:
        return self._text_of("content")

    @property
    def reasoning(self) -> str:
        return self._text_of("reasoning")

    @property
    def calls(self) -> tuple[tuple[str, str, str], ...]:
        """Id, name and arguments of each."""
        return tuple((item.call.id, item.call.name, item.text) for item in self._items if item.call is not None)

    def not_stored(self) -> None:
        """The answer says that it can't be continued."""
        self._base["store"] = False

    # --- Events

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first item."""
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, Any]]:
        """Takes in an event of the stream, and returns those to send for it. Raises Internal."""
        self.take(prompt, event)
        return self._taken()

    def closing(self) -> list[dict[str, Any]]:
        """The events that end the last item."""
        self._end()
        return self._taken()

    def last(self) -> dict[str, Any]:
        return self._event(f"response.{self._status}", response=self.whole())

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event after which a stream ends early."""
        code = "rate_limit_exceeded" if http_status(error) == _TOO_MANY else "server_error"
        told = {"code": code, "message": body_of(error)["error"]["message"]}
        response = self._response("failed", self._output("incomplete"))
        return self._event("response.failed", response={**response, "error": told})

    # --- The whole

    def whole(self) -> dict[str, Any]:
        self._end()
        response = self._response(self._status, self._output(self._status))
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
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning or 0, **self._predictions},
            "total_tokens": self._num_prompt_tokens + self._num_output,
        }

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> None:
        self._finish = finish_of(chunk) or self._finish
        form = self._form
        if form.num_logprobs is not None:
            self._logprobs += chat_logprobs(chunk.logprobs)["content"]
        for delta in deltas_of(chunk, is_parsed=form.is_parsed):
            self._add(delta)
        if self._logprobs and not form.is_parsed:
            self._add(pb.Delta(content=""))

    def _add(self, delta: pb.Delta) -> None:
        kind, piece = delta.WhichOneof("kind") or "", delta.tool_call
        # Only messages show logprobs.
        logprobs, self._logprobs = self._logprobs if kind == "content" else [], []
        if not self._items or self._items[-1].kind != kind or piece.name:
            self._end_item("completed")
            self._begin(kind, piece if kind == "tool_call" else None)
        text = piece.arguments if kind == "tool_call" else getattr(delta, kind)
        self._show(self._items[-1].add(text, logprobs))

    def _begin(self, kind: str, call: pb.ToolCallDelta | None = None) -> None:
        self._items.append(Item(kind, len(self._items), self._response_id, call, self._grow))
        self._show(self._items[-1].begin())

    def _end(self) -> None:
        """Ends the output."""
        if not self._items:
            self._begin("content")
        self._end_item(self._status)

    def _end_item(self, status: str) -> None:
        if self._items and not self._items[-1].is_done:
            self._show(self._items[-1].end(status))

    def _show(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        if self._form.is_stream:
            self._events += [self._event(kind, **fields) for kind, fields in events]

    def _taken(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def _text_of(self, kind: str) -> str:
        return "".join(item.text for item in self._items if item.kind == kind)

    def _output(self, status: str) -> Iterator[dict[str, Any]]:
        """status: of the last item."""
        *whole, last = self._items or [Item("content", 0, self._response_id)]
        return (item.shown(status if item is last else "completed") for item in (*whole, last))

    def _response(self, status: str, output: Iterable[dict[str, Any]]) -> dict[str, Any]:
        own = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self._base, **own}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}
