"""The items of a response's output, each with the events that tell of it."""

from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedList, Grow, uncounted
from router.api.gateway.openai.form import ASSISTANT

# Kinds of deltas, with the beginnings of their items' ids.
_PREFIXES = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}
# Kinds of items that have parts: the names of their events.
_PARTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}

Event = tuple[str, dict[str, Any]]


class Item:
    """A message, reasoning, or a call."""

    def __init__(
        self, kind: str, index: int, response_id: str, call: pb.ToolCallDelta | None = None, grow: Grow = uncounted
    ) -> None:
        """kind: of its deltas. index: its position in the output. call: the first piece of a call. grow: counts its
        logprobs."""
        self.kind, self.index, self.call = kind, index, call
        own = response_id.removeprefix("resp_")
        self._id = f"{_PREFIXES[kind]}_{own}" + (f"_{index}" if index else "")
        self._texts: list[str] = []
        self._logprobs = EncodedList(grow)
        self.is_done = False

    @property
    def text(self) -> str:
        """The content, reasoning or arguments so far."""
        return "".join(self._texts)

    def shown(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """Returns it as it is now, a tree to encode once. is_empty: as it begins."""
        item: dict[str, Any] = {"id": self._id, "status": status}
        text = "" if is_empty else self.text
        if self.call is not None:
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": text}
            return {"type": "function_call", **item, **call}
        content = iter([] if is_empty else [self._part(text)])
        if self.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": ASSISTANT, "content": content}

    def begin(self) -> list[Event]:
        events = [self._event("response.output_item.added", item=self.shown("in_progress", is_empty=True))]
        if self.kind in _PARTS:
            part = {**self._part(""), **({"logprobs": []} if self.kind == "content" else {})}
            events.append(self._of_part("response.content_part.added", part=part))
        return events

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """logprobs: of a message's text."""
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        if not text and not logprobs:
            return []
        if self.kind == "tool_call":
            return [self._of_item("response.function_call_arguments.delta", delta=text)]
        shown = {"logprobs": logprobs} if self.kind == "content" else {}
        return [self._of_part(f"{_PARTS[self.kind]}.delta", delta=text, **shown)]

    def end(self, status: str) -> list[Event]:
        self.is_done = True
        text, item = self.text, self.shown(status)
        done = self._event("response.output_item.done", item=item)
        if self.kind == "tool_call":
            name = item["name"]
            return [self._of_item("response.function_call_arguments.done", name=name, arguments=text), done]
        shown = {"logprobs": self._logprobs} if self.kind == "content" else {}
        return [
            self._of_part(f"{_PARTS[self.kind]}.done", text=text, **shown),
            self._of_part("response.content_part.done", part=self._part(text)),
            done,
        ]

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._id, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"output_index": self.index, **fields}
