"""The sum of the deltas of a parsed output, and their form in OpenAI's chats."""

from collections.abc import Iterable
from typing import Any

from protos import inference_pb2 as pb
from router.api.encoded import EncodedText, Grow, uncounted


class Call:
    """A tool call of an output."""

    __slots__ = ("arguments", "call_id", "name")

    def __init__(self, piece: pb.ToolCallDelta, grow: Grow) -> None:
        self.call_id, self.name = piece.id, piece.name
        self.arguments = EncodedText(piece.arguments, grow)


class Output:
    """One choice's output."""

    __slots__ = ("_grow", "calls", "content", "reasoning")

    def __init__(self, echoed: str = "", grow: Grow = uncounted) -> None:
        """echoed: what comes before the content. grow: counts what is kept."""
        self._grow = grow
        self.content, self.reasoning = EncodedText(echoed, grow), EncodedText(grow=grow)
        self.calls: list[Call] = []

    def add(self, deltas: Iterable[pb.Delta]) -> None:
        for delta in deltas:
            match delta.WhichOneof("kind"):
                case "content":
                    self.content.add(delta.content)
                case "reasoning":
                    self.reasoning.add(delta.reasoning)
                case "tool_call" if delta.tool_call.name:
                    self.calls.append(Call(delta.tool_call, self._grow))
                case "tool_call":
                    self.calls[delta.tool_call.index].arguments.add(delta.tool_call.arguments)


def deltas_of(chunk: pb.Chunk, *, is_parsed: bool) -> list[pb.Delta]:
    """Returns a chunk's deltas; of an output that is not parsed, its text."""
    if is_parsed:
        return list(chunk.deltas)
    return [pb.Delta(content=chunk.text)] if chunk.text else []


def message_fields(output: Output) -> dict[str, Any]:
    """Returns the fields of a whole message, a tree to encode once."""
    content, reasoning = output.content, output.reasoning
    has_others = output.calls or reasoning.num_bytes
    fields: dict[str, Any] = {"content": content if content.num_bytes or not has_others else None}
    if reasoning.num_bytes:
        fields.update(_reasoning(reasoning))
    if output.calls:
        fields["tool_calls"] = (_call(call.call_id, call.name, call.arguments) for call in output.calls)
    return fields


def delta_fields(deltas: Iterable[pb.Delta]) -> dict[str, Any]:
    """Returns the fields of a delta in a stream; of each kind those that there are."""
    content = reasoning = ""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta.WhichOneof("kind"):
            case "content":
                content += delta.content
            case "reasoning":
                reasoning += delta.reasoning
            case "tool_call":
                piece = delta.tool_call
                if piece.name:
                    calls[piece.index] = {"index": piece.index, **_call(piece.id, piece.name, piece.arguments)}
                elif piece.index in calls:
                    calls[piece.index]["function"]["arguments"] += piece.arguments
                else:
                    calls[piece.index] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    fields: dict[str, Any] = {"content": content} if content else {}
    if reasoning:
        fields.update(_reasoning(reasoning))
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def _reasoning(text: Any) -> dict[str, Any]:
    # Newer clients read the first name, older ones the second.
    return {"reasoning": text, "reasoning_content": text}


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
