"""Collects what a parser gives out, as the messages that clients get."""

import hashlib
from collections.abc import Callable
from string import ascii_letters, digits

from protos.inference_pb2 import Delta, ToolCallDelta

_ALPHANUMERIC = digits + ascii_letters


def call_id(request_id: str, choice: int, index: int) -> str:
    """Returns the id of a choice's call, the same wherever and whenever it is computed."""
    return f"call_{_digest(request_id, choice, index).hexdigest()[:24]}"


def short_call_id(request_id: str, choice: int, index: int) -> str:
    """Returns an id as Mistral's templates want it: nine letters and digits."""
    number = int.from_bytes(_digest(request_id, choice, index).digest())
    chars: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        chars.append(_ALPHANUMERIC[digit])
    return "".join(chars)


def _digest(request_id: str, choice: int, index: int) -> "hashlib._Hash":
    return hashlib.sha256(f"{index}:{choice}:{request_id}".encode(errors="surrogatepass"))


class Deltas:
    """The deltas that have been told apart and not been taken yet.

    Whitespace at the beginning of the content, and behind a call, waits for the text that follows: without text between
    them, calls come without content.
    """

    __slots__ = (
        "_hidden_call",
        "_id_of",
        "_include_reasoning",
        "_pending",
        "_spaces",
        "_taken",
        "max_calls",
        "num_begun",
        "num_calls",
        "num_malformed",
    )

    def __init__(self, id_of: Callable[[int], str], *, max_calls: int | None, include_reasoning: bool) -> None:
        """id_of: the id of the call at a position. max_calls: later ones are left out; None: no bound."""
        self._id_of = id_of
        self._include_reasoning = include_reasoning
        self.max_calls = max_calls
        # Calls given out; and with those left out.
        self.num_calls = 0
        self.num_begun = 0
        # Texts that began as a call and did not go on as one.
        self.num_malformed = 0
        self._pending: list[Delta] = []
        # The pieces of text of the last one in _pending.
        self._taken: list[str] = []
        self._spaces: list[str] | None = []
        self._hidden_call = False

    def content(self, text: str) -> None:
        if self._spaces is not None and text:
            self._spaces.append(text)
            if text.isspace():
                return
            text, self._spaces = "".join(self._spaces), None
        self._add("content", text)

    def reasoning(self, text: str) -> None:
        if self._include_reasoning:
            self._add("reasoning", text)

    def begin_call(self, name: str) -> None:
        """Begins a call; its arguments follow."""
        self._spaces = []
        self.num_begun += 1
        self._hidden_call = self.max_calls is not None and self.num_begun > self.max_calls
        if self._hidden_call:
            return
        index = self.num_calls
        self.num_calls += 1
        self._flush()
        self._pending.append(Delta(tool_call=ToolCallDelta(index=index, id=self._id_of(index), name=name)))

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call begun last."""
        if not self._hidden_call:
            self._add("tool_call", text)

    def malformed(self, text: str) -> None:
        """Notes that something is no call. text: what stays text."""
        self.num_malformed += 1
        self.content(text)

    def end(self) -> None:
        """No more comes."""
        if self._spaces and not self.num_calls:
            self._add("content", "".join(self._spaces))
        self._spaces = None

    def take(self) -> list[Delta]:
        """Returns what has come since the last time."""
        self._flush()
        taken, self._pending = self._pending, []
        return taken

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._pending or self._pending[-1].WhichOneof("kind") != kind:
            self._flush()
            delta = Delta()
            if kind == "tool_call":
                delta.tool_call.index = self.num_calls - 1
            else:
                setattr(delta, kind, "")
            self._pending.append(delta)
        self._taken.append(text)

    def _flush(self) -> None:
        """Writes the pieces into the message that they belong to."""
        if not self._taken:
            return
        text, last = "".join(self._taken), self._pending[-1]
        self._taken.clear()
        if last.WhichOneof("kind") == "tool_call":
            last.tool_call.arguments = text
        else:
            setattr(last, last.WhichOneof("kind") or "", text)
