"""The reply to a request of messages: one message, whole or in events."""

from typing import Any

from protos import inference_pb2 as pb
from router.api.gateway.anthropic.errors import message_error
from router.api.gateway.openai.form import ASSISTANT, Form
from router.api.gateway.openai.reply import Reply, TokenTable, finish_of


class MessageReply(Reply):
    def __init__(self, form: Form, name: str, model: str, table: TokenTable) -> None:
        """name: the message's id."""
        super().__init__(form, {"id": name, "type": "message", "role": ASSISTANT, "model": model}, 1, table)
        self._text = ""
        self._has_block = False
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def _take_chunk(self, prompt: int, chunk: pb.Chunk) -> dict[str, Any] | None:
        if finish := finish_of(chunk):
            self._stop = self._stop_of(chunk.finish, finish)
        text = "" if self._form.drops_output else chunk.text
        if not self._form.is_stream:
            self._text += text
            return None
        return {"type": "content_block_delta", "index": 0, "delta": _text("text_delta", text)} if text else None

    def _stop_of(self, finish: pb.Finish, reason: str) -> dict[str, str | None]:
        if self._form.drops_output or reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if finish.HasField("stop_string"):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def pieces(self, prompt: int, event: pb.GenerateResponse) -> list[dict[str, str]]:
        pieces = super().pieces(prompt, event)
        if event.HasField("started"):
            message = {**self._base, "content": [], **self._stop, "usage": self.usage}
            return [self._sent({"type": "message_start", "message": message})]
        if pieces and not self._has_block:
            self._has_block = True
            begin = {"type": "content_block_start", "index": 0, "content_block": _text("text", "")}
            return [self._sent(begin), *pieces]
        return pieces

    def last_pieces(self) -> list[dict[str, str]]:
        ends = [{"type": "content_block_stop", "index": 0}] if self._has_block else []
        delta = {"type": "message_delta", "delta": self._stop, "usage": self.usage}
        return [self._sent(piece) for piece in (*ends, delta, {"type": "message_stop"})]

    def error_piece(self, error: Exception) -> dict[str, str]:
        return self._sent(message_error(error))

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
        content = [_text("text", self._text)] if self._text else []
        return {**self._base, "content": content, **self._stop, "usage": self.usage}


def _text(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}
