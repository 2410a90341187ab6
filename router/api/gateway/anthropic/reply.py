"""The reply to a request of messages: one message, whole or in events."""

from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.anthropic.errors import message_error
from router.api.gateway.openai.form import ASSISTANT, Form
from router.api.gateway.openai.outputs import deltas_of
from router.api.gateway.openai.reply import Reply, finish_of
from router.text.tokenizer import Tokenizer
from runtime.grammar.json_text import json_object


class _Block:
    """A block of the content."""

    __slots__ = ("_start", "_texts", "kind")

    def __init__(self, delta: pb.Delta) -> None:
        """delta: the block's first one."""
        self.kind = delta.WhichOneof("kind")
        self._texts: list[str] = []
        if self.kind == "tool_call":
            call = delta.tool_call
            self._start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif self.kind == "reasoning":
            self._start = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._start = {"type": "text", "text": ""}

    @property
    def start(self) -> dict[str, Any]:
        return self._start

    def holds(self, delta: pb.Delta) -> bool:
        """Tells whether a delta goes on with this block."""
        return delta.WhichOneof("kind") == self.kind and not delta.tool_call.name

    def add(self, delta: pb.Delta) -> dict[str, str] | None:
        """Returns the delta of a stream; None if the block begins without any."""
        if self.kind == "tool_call":
            text, shown = delta.tool_call.arguments, ("input_json_delta", "partial_json")
        elif self.kind == "reasoning":
            text, shown = delta.reasoning, ("thinking_delta", "thinking")
        else:
            text, shown = delta.content, ("text_delta", "text")
        self._texts.append(text)
        return {"type": shown[0], shown[1]: text} if text else None

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self.kind == "tool_call":
            return {**self._start, "input": _input(text)}
        return {**self._start, "thinking" if self.kind == "reasoning" else "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments; those that are no object, because the output broke off, as a text."""
    try:
        return json_object(arguments or "{}", "arguments")
    except ValueError:
        return {"INVALID_JSON": arguments}


class MessageReply(Reply):
    def __init__(self, form: Form, name: str, model: str, table: Tokenizer) -> None:
        """name: the message's id."""
        super().__init__(form, {"id": name, "type": "message", "role": ASSISTANT, "model": model}, 1, table)
        # In a stream only the last one.
        self._blocks: list[_Block] = []
        self._num_blocks = 0
        # Events to send.
        self._events: list[dict[str, Any]] = []
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> None:
        form = self._form
        if finish := finish_of(chunk):
            self._stop = self._stop_of(chunk.finish, finish)
        if form.drops_output:
            return
        for delta in deltas_of(chunk, is_parsed=form.is_parsed):
            self._add(delta)

    def _add(self, delta: pb.Delta) -> None:
        if not (self._blocks and self._blocks[-1].holds(delta)):
            self._end_block()
            block = _Block(delta)
            self._blocks.append(block)
            self._num_blocks += 1
            self._show("content_block_start", content_block=block.start)
        shown = self._blocks[-1].add(delta)
        if shown is not None:
            self._show("content_block_delta", delta=shown)

    def _end_block(self) -> None:
        if self._form.is_stream and self._blocks:
            self._show("content_block_stop")
            self._blocks.clear()

    def _show(self, kind: str, **fields: Any) -> None:
        if self._form.is_stream:
            self._events.append({"type": kind, "index": self._num_blocks - 1, **fields})

    def _stop_of(self, finish: pb.Finish, reason: str) -> dict[str, str | None]:
        if self._form.drops_output or reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if finish.has_tool_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish.HasField("stop_string"):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def pieces(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, str]]:
        self.take(prompt, event)
        if event.HasField("started"):
            message = {**self._base, "content": [], **self._stop, "usage": self.usage}
            return [self._sent({"type": "message_start", "message": message})]
        return self._taken()

    def last_pieces(self) -> list[dict[str, str]]:
        self._end_block()
        delta = {"type": "message_delta", "delta": self._stop, "usage": self.usage}
        return [*self._taken(), self._sent(delta), self._sent({"type": "message_stop"})]

    def error_piece(self, error: Exception) -> dict[str, str]:
        return self._sent(message_error(error))

    def _taken(self) -> list[dict[str, str]]:
        events, self._events = self._events, []
        return list(map(self._sent, events))

    def _sent(self, piece: dict[str, Any]) -> dict[str, str]:
        return {"event": piece["type"], **super()._sent(piece)}

    @property
    def usage(self) -> dict[str, Any]:
        """Cached tokens are not among input_tokens; how many there are is known when the output ends."""
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }

    def whole(self) -> dict[str, Any]:
        content = [block.whole() for block in self._blocks]
        return {**self._base, "content": content, **self._stop, "usage": self.usage}
